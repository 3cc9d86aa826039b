"""Runs a loaded plan: fixed memory, kernels or their torch interpreter."""
