"""Prefix paths of the running requests: the only readers of SGLang's trees and requests."""
