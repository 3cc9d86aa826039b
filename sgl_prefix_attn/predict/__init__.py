"""Predicted times of both kernels, from a calibration: what a server loads."""
