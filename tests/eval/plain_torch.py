"""Plain torch as a provider of eval.bench_kernel: slow, runs anywhere; shows that it works."""

import torch

from eval.bench_kernel.oracle import attend
from eval.bench_kernel.providers.provider import Provider, Runnable


def plain_torch(case):
    return Runnable(
        lambda layer: attend(case, case.k[layer], case.v[layer], torch.float32, case.dtype)
    )


class PlainTorch(Provider):
    needs_cuda = False

    def __init__(self, name="torch"):
        super().__init__(name, "torch", plain_torch)
