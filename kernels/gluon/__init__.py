"""Row-tile attention: one persistent, warp-specialised Gluon kernel for Hopper."""
