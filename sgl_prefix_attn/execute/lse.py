"""Log-sum-exp values that know their base.

FlashInfer returns base 2, SGLang's Triton merge expects base e; mixing them corrupts outputs
silently. Here a base travels with the values and mixing raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_NATURAL_PER_BASE = {"e": 1.0, "2": math.log(2.0)}


@dataclass(frozen=True)
class Lse:
    """values float32 [B, num_qo_heads] in units of log_base; -inf where nothing was attended."""

    values: torch.Tensor
    base: str

    def __post_init__(self):
        if self.base not in _NATURAL_PER_BASE:
            raise ValueError(f"base must be one of {sorted(_NATURAL_PER_BASE)}, got {self.base!r}")

    def to_base(self, base: str) -> Lse:
        if base not in _NATURAL_PER_BASE:
            raise ValueError(f"base must be one of {sorted(_NATURAL_PER_BASE)}, got {base!r}")
        factor = _NATURAL_PER_BASE[self.base] / _NATURAL_PER_BASE[base]
        return self if base == self.base else Lse(self.values * factor, base)


def merge_states(
    out_a: torch.Tensor, lse_a: Lse, out_b: torch.Tensor, lse_b: Lse
) -> tuple[torch.Tensor, Lse]:
    """Merge attention over two disjoint KV sets ([B, Hq, D], [B, Hq]).

    Raises ValueError when the two LSE have different bases.
    """
    if lse_a.base != lse_b.base:
        raise ValueError(f"lse_a is in base {lse_a.base}, lse_b in base {lse_b.base}")
    to_natural = _NATURAL_PER_BASE[lse_a.base]
    a, b = lse_a.values * to_natural, lse_b.values * to_natural
    total = torch.logaddexp(a, b)
    top = torch.where(torch.isneginf(total), torch.zeros_like(total), total)
    weight_a, weight_b = torch.exp(a - top)[..., None], torch.exp(b - top)[..., None]
    out = (out_a.float() * weight_a + out_b.float() * weight_b).to(out_a.dtype)
    return out, Lse(total / to_natural, lse_a.base)
