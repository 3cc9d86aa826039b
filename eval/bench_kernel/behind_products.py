"""Times of attention as it runs in a model: behind products that have replaced what was in the L2
cache and in the instruction caches, so that a kernel's own code comes from memory, too.

The profiler tells the kernels apart. To time both and take products alone off would charge
attention for what it does to the products' caches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Iterable
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sgl_prefix_attn.tools.calibrate.timing import LayerTimer

# Of Llama 3.1 8B: the weights of its last product take 117 MB, twice a Hopper GPU's L2 cache.
_HIDDEN, _INTERMEDIATE = 4096, 14336
_ROWS = 64
_REPLAYS = 20


class Kernel(NamedTuple):
    """One on the GPU, in microseconds."""

    start: float
    end: float
    name: str


class BehindProducts(LayerTimer):
    """A LayerTimer whose layers are a product and `run(layer)`; the time is that of the latter's
    kernels, from the start of the first to the end of the last."""

    def __init__(
        self, run: Callable[[int], torch.Tensor], layers: int, device: torch.device, capture: bool
    ):
        x, weights, out = _operands(device)

        def product() -> torch.Tensor:
            return torch.mm(x, weights, out=out)

        def both(layer: int) -> torch.Tensor:
            product()
            return run(layer)

        super().__init__(both, layers, device, capture)
        product()
        self._products = {kernel.name for kernel in kernels_of(product)}

    @property
    def kind(self) -> str:
        return f"{super().kind}, behind products"

    def us(self) -> float:
        def replays() -> None:
            for _ in range(_REPLAYS):
                self.replay()

        self.replay()
        return statistics.median(spans(kernels_of(replays), self._products))


def kernels_of(work: Callable[[], object]) -> list[Kernel]:
    """Return what runs on the GPU, copies and fills included, in the order in which it starts."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    return sorted(
        Kernel(event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events()
        if event.device_type == DeviceType.CUDA
    )


def spans(kernels: Iterable[Kernel], products: Container[str]) -> list[float]:
    """Return how long the kernels between a product and the next one took, from the first's start
    to the last's end; a product may be several kernels."""
    between = (
        list(group)
        for is_product, group in groupby(kernels, lambda kernel: kernel.name in products)
        if not is_product
    )
    return [max(kernel.end for kernel in group) - group[0].start for group in between]


@lru_cache(maxsize=1)
def _operands(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (_ROWS, _INTERMEDIATE), (_INTERMEDIATE, _HIDDEN), (_ROWS, _HIDDEN)
    x, weights, out = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    return x, weights, out
