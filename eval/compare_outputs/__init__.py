"""Greedy outputs of a real engine with `prefix`, against the noise between two stock backends."""
