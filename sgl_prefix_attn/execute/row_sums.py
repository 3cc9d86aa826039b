"""Attention summed row by row, in float32: a row's results depend on no other row, to the last bit.

The order of all sums is fixed by their length alone, which a library's products do not promise, and
a block without a column of a row changes nothing of it. What kernels do over aligned plans, done
with operations on single elements.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch

_LOWEST = -1.0e30  # below every score: rows without a column yet must not make inf - inf


class RowSums(NamedTuple):
    """Of an item's rows: results acc [Hkv, rows, Dv], unnormalised, their maxima `top` [Hkv, rows]
    and sums `total` [Hkv, rows], all float32."""

    acc: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor

    @classmethod
    def none(cls, q: torch.Tensor, value_dim: int) -> RowSums:
        """Return those of rows q [Hkv, rows, D] over no columns, whose values have value_dim."""
        zeros = torch.zeros(q.shape[:2])
        return cls(zeros[..., None].expand(*zeros.shape, value_dim), zeros + _LOWEST, zeros)

    def over(self, logits: torch.Tensor, v: torch.Tensor) -> RowSums:
        """Return them over one more block: logits [Hkv, rows, columns], -inf where masked, and
        values [columns, Hkv, D]."""
        top = torch.maximum(self.top, logits.amax(2))
        p, shrink = torch.exp(logits - top[..., None]), torch.exp(self.top - top)
        added = _sum(p[..., None, :] * v.permute(1, 2, 0)[:, None])
        return RowSums(self.acc * shrink[..., None] + added, top, self.total * shrink + _sum(p))

    def merged_with(self, other: RowSums) -> RowSums:
        """Return the sums of both."""
        top = torch.maximum(self.top, other.top)
        mine, its = torch.exp(self.top - top), torch.exp(other.top - top)
        return RowSums(
            self.acc * mine[..., None] + other.acc * its[..., None],
            top,
            self.total * mine + other.total * its,
        )

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [Hkv, rows, D] and the LSE [Hkv, rows] in base 2, float64."""
        total = self.total.double()
        out = self.acc.double() / total.where(total != 0, 1.0)[..., None]
        return out, (self.top.double() + torch.log(total)) / math.log(2)


def merged(parts: list[RowSums]) -> RowSums:
    """Return the sums over all parts, one after the other."""
    return reduce(RowSums.merged_with, parts)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Multiply rows q [Hkv, rows, D] with keys [columns, Hkv, D]: [Hkv, rows, columns], float32."""
    return _sum(q.float()[:, :, None] * k.float().transpose(0, 1)[:, None])


def _sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis, by halves."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        odd = x[..., 2 * half :]
        x = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([x, odd], -1) if odd.shape[-1] else x
    return x[..., 0]
