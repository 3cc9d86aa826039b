"""Times of attention as it runs in a model: behind products that have replaced what was in the L2
cache and in the instruction caches, so that a kernel's own code comes from memory, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from sgl_prefix_attn.tools.calibrate.timing import LayerTimer, medians_us

# Of Llama 3.1 8B: the weights of its last product take 117 MB, more than any L2 cache holds.
_HIDDEN, _INTERMEDIATE = 4096, 14336
_ROWS = 64


class BehindProducts(LayerTimer):
    """A LayerTimer whose layers are a product and `run(layer)`; its time is theirs less that of the
    products alone, which take turns with it."""

    def __init__(
        self, run: Callable[[int], torch.Tensor], layers: int, device: torch.device, capture: bool
    ):
        x, weights, out = _operands(device)

        def product(_layer: int = 0) -> torch.Tensor:
            return torch.mm(x, weights, out=out)

        def both(layer: int) -> torch.Tensor:
            product()
            return run(layer)

        super().__init__(both, layers, device, capture)
        self._products = LayerTimer(product, layers, device, capture)

    @property
    def kind(self) -> str:
        return f"{super().kind}, behind products"

    def us(self) -> float:
        products, both = medians_us([self._products, self])
        return both - products


@lru_cache(maxsize=1)
def _operands(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (_ROWS, _INTERMEDIATE), (_INTERMEDIATE, _HIDDEN), (_ROWS, _HIDDEN)
    x, weights, out = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    return x, weights, out
