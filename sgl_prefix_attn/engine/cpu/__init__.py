"""A plain PyTorch platform for SGLang on machines without a GPU."""
