"""Families of kernels, of one base class (kernel_backend.py), chosen in one place (family.py)."""
