"""Kernel families behind one protocol (kernel_backend.py), chosen in one place (family.py)."""
