"""Decode attention kernels over prefix trees: correctness first, then time against the floor."""
