"""Attention of tiles of requests: one persistent, warp-specialised Gluon kernel for Hopper."""
