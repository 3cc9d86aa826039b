"""Times of attention as it runs in a model: behind the products of a layer, which have replaced
what was in the L2 cache and, being several kernels, in the SMs' instruction caches. One product
would leave most of the kernel's code there (docs/kernel-log.md).

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

# Of Llama 3.1 8B, in the order in which they run between one layer's attention and the next one's;
# the third one's weights take 117 MB, twice a Hopper GPU's L2 cache.
_PRODUCTS = ((4096, 4096), (4096, 2 * 14336), (14336, 4096), (4096, 6144))
_ROWS = 64
_REPLAYS = 20


class Kernel(NamedTuple):
    """One on the GPU, in microseconds."""

    start: float
    end: float
    name: str


class BehindProducts(LayerTimer):
    """A LayerTimer whose layers are products and `run(layer)`; the time is that of the latter's
    kernels, from the start of the first to the end of the last."""

    def __init__(
        self, run: Callable[[int], torch.Tensor], layers: int, device: torch.device, capture: bool
    ):
        operands = _operands(device)

        def products() -> torch.Tensor:
            for x, weights, out in operands:
                torch.mm(x, weights, out=out)
            return out

        def both(layer: int) -> torch.Tensor:
            products()
            return run(layer)

        super().__init__(both, layers, device, capture)
        alone = LayerTimer(lambda _: products(), 1, device, capture)
        alone.replay()
        self._products = {kernel.name for kernel in kernels_of(alone.replay)}

    @property
    def kind(self) -> str:
        return f"{super().kind}, behind products"

    def us(self) -> float:
        def replays() -> None:
            for _ in range(_REPLAYS):
                self.replay()

        self.replay()
        found = spans(kernels_of(replays), self._products)
        if len(found) != _REPLAYS * self.layers:
            raise RuntimeError(
                f"{len(found)} stretches between products in {_REPLAYS} x {self.layers} layers"
            )
        return statistics.median(found)


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
    """Return how long the kernels between products and the next ones took, from the first's start
    to the last's end."""
    between = (
        list(group)
        for is_product, group in groupby(kernels, lambda kernel: kernel.name in products)
        if not is_product
    )
    return [max(kernel.end for kernel in group) - group[0].start for group in between]


@lru_cache(maxsize=1)
def _operands(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    return [(new(_ROWS, k), new(k, n), new(_ROWS, n)) for k, n in _PRODUCTS]
