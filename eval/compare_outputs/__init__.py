"""Attention of a running engine against float64 attention over the same KV."""
