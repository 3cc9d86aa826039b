"""Times of attention as it runs in a model: behind the products, norms and activation of a layer,
which have replaced what was in the L2 cache and, being many kernels, some of the code in the SMs'
instruction caches (docs/kernel-log.md).

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
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sgl_prefix_attn.tools.calibrate.timing import LayerTimer

# Widths of Llama 3.1 8B; the weights between one layer's attention and the next one's take 436 MB,
# several times a Hopper GPU's L2 cache.
_HIDDEN, _INNER, _QKV = 4096, 14336, 6144
_ROWS = 64
_REPLAYS = 20


class Kernel(NamedTuple):
    """One on the GPU, in microseconds."""

    start: float
    end: float
    name: str


class BehindProducts(LayerTimer):
    """A LayerTimer whose layers are all else that a layer runs and `run(layer)`; the time is that
    of the latter's kernels, from the start of the first to the end of the last."""

    def __init__(
        self, run: Callable[[int], torch.Tensor], layers: int, device: torch.device, capture: bool
    ):
        operands = _operands(device)

        def both(layer: int) -> torch.Tensor:
            _all_else(*operands)
            return run(layer)

        super().__init__(both, layers, device, capture)
        alone = LayerTimer(lambda _: _all_else(*operands), 1, device, capture)
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
def _operands(device: torch.device) -> list[torch.Tensor]:
    """Attention's output, and the weights that follow it."""
    shapes = (
        (_ROWS, _HIDDEN), (_HIDDEN, _HIDDEN), (_HIDDEN, 2 * _INNER), (_INNER, _HIDDEN),
        (_HIDDEN, _QKV),
    )  # fmt: skip
    return [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]


def _all_else(x, output, gate_and_up, down, qkv) -> torch.Tensor:
    """Run what is between one layer's attention and the next one's, rotary embedding apart."""
    x = F.rms_norm(torch.mm(x, output), (_HIDDEN,))
    gate, up = torch.mm(x, gate_and_up).chunk(2, dim=1)
    x = torch.mm(F.silu(gate) * up, down)
    return torch.mm(F.rms_norm(x, (_HIDDEN,)), qkv)
