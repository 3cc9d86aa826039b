"""What a provider is: something that plans and runs decode attention for a benchmark case."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch

from eval.bench_kernel.case import Case


class Unsupported(Exception):
    """The provider cannot run this case; the message says why."""


@dataclass
class Runnable:
    """A provider prepared for one case: buffers made, planned once.

    run    launches attention of a layer [B, Hq, D], without host-device synchronisation
    plan   does the host work of one new batch of the same shape; by default there is none
    facts  more that its row says
    """

    run: Callable[[int], torch.Tensor]
    plan: Callable[[], object] = lambda: None
    facts: dict = field(default_factory=dict)


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

    def load(self) -> ModuleType:
        """Import it. Raises whatever a broken build raises."""
        return importlib.import_module(self.module)

    def available(self) -> str | None:
        """Say why it cannot run on this machine, or return None."""
        if self.needs_cuda and not torch.cuda.is_available():
            return "needs an NVIDIA GPU"
        try:
            self.load()
        except Exception as error:  # a broken build fails with anything, from OSError to TypeError
            return f"cannot import {self.module}: {type(error).__name__}: {error}"
        return None

    def page_size(self, requested: int) -> int:
        """Return the page size it runs at where it has no kernel for the requested one."""
        return requested

    def prepare(self, case: Case) -> Runnable:
        """Raises Unsupported for a case that it has no kernel for."""
        return self.runnable(case)


def pick(names: Sequence[str], known: Mapping[str, Callable[[], Provider]]) -> list[Provider]:
    """Make providers in the given order. Raises ValueError for a name that does not exist."""
    for name in names:
        if name not in known:
            raise ValueError(f"provider {name!r}: known are {', '.join(known)}")
    return [known[name]() for name in names]
