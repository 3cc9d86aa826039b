"""Ablations of the row-tile kernel: one change at a time, over the same trees."""
