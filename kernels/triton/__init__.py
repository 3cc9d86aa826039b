"""Triton kernels over a plan's words."""
