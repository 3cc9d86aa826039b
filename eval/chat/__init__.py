"""A chat with a real model on a server with prefix kernels: python -m eval.chat."""
