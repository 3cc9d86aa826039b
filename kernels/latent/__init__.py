"""Kernel over latent KV of Hopper GPUs, in Gluon: absorbed multi-head latent attention."""
