"""Kernels and the word layout they share with the planner; import nothing of the package."""
