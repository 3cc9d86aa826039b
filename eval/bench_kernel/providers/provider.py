"""What a provider is: something that plans and runs decode attention for a benchmark case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from eval.bench_kernel.case import Case


class Unsupported(Exception):
    """The provider cannot run this case; the message says why."""


class Runnable(Protocol):
    """A provider prepared for one case: buffers made, planned once."""

    def plan(self) -> None:
        """Do the host work of one new batch of the same shape."""

    def run(self, layer: int) -> torch.Tensor:
        """Launch attention of a layer [B, Hq, D], without host-device synchronisation."""


class Provider:
    """Stateless between cases. By default it needs `module` to be importable and a GPU, runs at any
    page size, and prepares any case as `runnable`.

    capturable  whether run() may be captured in a CUDA graph
    narrows     whether it rounds queries and probabilities, too, to the dtype of a narrow KV cache
    """

    capturable = True
    narrows = False
    needs_cuda = True

    def __init__(self, name: str, module: str, runnable: Callable[[Case], Runnable]):
        self.name, self.module, self.runnable = name, module, runnable

    def available(self) -> str | None:
        """Say why it cannot run on this machine, or return None."""
        if self.needs_cuda and not torch.cuda.is_available():
            return "needs an NVIDIA GPU"
        try:
            __import__(self.module)
        except Exception as error:  # a broken build fails with anything, from OSError to TypeError
            return f"cannot import {self.module}: {type(error).__name__}: {error}"
        return None

    def page_size(self, requested: int) -> int:
        """Return the page size it runs at where it has no kernel for the requested one."""
        return requested

    def prepare(self, case: Case) -> Runnable:
        """Raises Unsupported for a case that it has no kernel for."""
        return self.runnable(case)
