"""Plain torch at the case's precision: slow, runs anywhere; shows that the harness works."""

from __future__ import annotations

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.oracle import attend
from eval.bench_kernel.providers.provider import Provider


class PlainTorchRunnable:
    def __init__(self, case: Case):
        self._case = case

    def plan(self) -> None:
        """Do nothing."""

    def run(self, layer: int) -> torch.Tensor:
        case = self._case
        return attend(case, case.k[layer], case.v[layer], torch.float32, case.dtype)


class PlainTorch(Provider):
    name = "torch"
    module = "torch"
    needs_cuda = False
    runnable = PlainTorchRunnable
