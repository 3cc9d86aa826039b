"""Plain torch as a provider of eval.bench_kernel: slow, runs anywhere; shows that it works."""

import torch

from eval.bench_kernel.oracle import attend
from eval.bench_kernel.providers.provider import Provider


class PlainTorchRunnable:
    def __init__(self, case):
        self._case = case

    def plan(self):
        """Do nothing."""

    def run(self, layer):
        case = self._case
        return attend(case, case.k[layer], case.v[layer], torch.float32, case.dtype)


class PlainTorch(Provider):
    needs_cuda = False

    def __init__(self, name="torch"):
        super().__init__(name, "torch", PlainTorchRunnable)
