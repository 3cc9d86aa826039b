"""Kernels and the word layout they share with the planner; imports neither sglang nor the package."""
