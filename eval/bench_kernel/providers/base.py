"""What a provider is: something that plans and runs decode attention for a benchmark case."""

from __future__ import annotations

from typing import Protocol

import torch

from eval.bench_kernel.case import Case


class Unsupported(Exception):
    """The provider cannot run this case; the message says why."""


class Runnable(Protocol):
    """A provider prepared for one case: buffers made, planned once."""

    def plan(self) -> None:
        """Host work of one new batch of the same shape."""

    def run(self, layer: int) -> torch.Tensor:
        """Attention of layer `layer` [B, Hq, D]; launches only, no host-device synchronisation."""


class Provider(Protocol):
    """Stateless between cases. `capturable`: run() may be captured in a CUDA graph."""

    name: str
    capturable: bool

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None."""

    def page_size(self, requested: int) -> int:
        """The page size it runs at where it has no kernel for the requested one."""

    def prepare(self, case: Case) -> Runnable:
        """Raises Unsupported for a case that it has no kernel for."""


class BaseProvider:
    """Defaults: capturable, any page size, needs an importable module and perhaps a GPU."""

    name = ""
    module = ""
    capturable = True
    needs_cuda = True

    def available(self) -> str | None:
        if self.needs_cuda and not torch.cuda.is_available():
            return "needs an NVIDIA GPU"
        try:
            __import__(self.module)
        except Exception as error:  # a broken build fails with anything, from OSError to TypeError
            return f"cannot import {self.module}: {type(error).__name__}: {error}"
        return None

    def page_size(self, requested: int) -> int:
        return requested
