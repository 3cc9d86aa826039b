"""Attention of several tokens a request: see __main__.py."""
