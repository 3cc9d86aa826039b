"""Offline tile solver (PAT §5.2): which tile configurations a GPU can run well, and why not."""
