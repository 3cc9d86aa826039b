"""What the kernels sustain on a GPU: what times of plans (cut_time.py) are computed from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from sgl_prefix_attn.kernels import words as W


@dataclass(frozen=True)
class KernelRates:
    """What Hopper's kernel sustains on a GPU, in microseconds; each element of KV counts as two
    bytes, whatever it has.

    wide, narrow      of a CTA, for an unmasked block of a tile, of one of up to narrow_rows rows
                      (head dim 128)
    wide_masked, narrow_masked  the same for a masked block
    item              of a CTA, for an item besides its blocks
    hbm, l2           bytes/us that all SMs together gather
    fixed             of a step, however little there is to do
    split             of a step, where any result is merged from several items
    part              of a step, for each partial result of the query that has most of them
    partial           bytes/us of partial results, written and read back
    overlap           exponent of the norm that joins CTAs, memory and L2: infinite where the
                      slowest hides the others
    narrow_rows       most rows of a narrow tile: a property of the kernel, not of the GPU
    products          wide and narrow where nothing but the products of unmasked blocks bounds a
                      step (docs/kernel-log.md). Decode steps, to which the rates are fitted, hardly
                      ever get there; steps of many new tokens do.

    The numbers are one fit to 12,508 cuts of 400 random batches on an H100, at eight head
    configurations of 128 (eval/results/row_tile_fit_h100.json): 5 to 6 % off, root mean square.
    They hold together, not one by one: with this exponent, rates are above what is measured alone.
    """

    wide: float = 0.6761
    narrow: float = 0.5587
    wide_masked: float = 0.5554
    narrow_masked: float = 0.6151
    item: float = 1.627
    hbm: float = 3.795e6
    l2: float = 52.08e6
    fixed: float = 4.292
    split: float = 1.533
    part: float = 0.06812
    partial: float = 1.192e6
    overlap: float = 1.265

    narrow_rows: ClassVar[int] = W.HALF_ROWS
    products: ClassVar[tuple[float, float]] = (1.03, 0.80)

    def __post_init__(self):
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and >= 0, got {value!r}")


@dataclass(frozen=True)
class PortableRates(KernelRates):
    """What the portable kernel sustains on an H100 with two CTAs an SM; its small tiles have up to
    16 rows.

    One fit to four cuts of each of PAT's 20 trees at 32/8 heads of 128: 2.6 % off, root mean
    square, and the cuts that it picks take 1.001 of the fastest ones' time. Those of three other
    head configurations were not among them.
    """

    wide: float = 2.0
    narrow: float = 2.004
    wide_masked: float = 2.007
    narrow_masked: float = 1.951
    item: float = 5.627
    hbm: float = 3.446e6
    l2: float = 7.421e6
    fixed: float = 4.262
    split: float = 0.2995
    part: float = 0.4572
    partial: float = 0.8507e6
    overlap: float = 2.949

    narrow_rows: ClassVar[int] = 16


@dataclass(frozen=True)
class LatentRates(KernelRates):
    """What the kernel over latent KV sustains on an H100. All of its tiles are narrow: two
    warpgroups share the columns of up to 64 rows.

    One fit to random batches at 16 heads (eval/results/calibration_h100_16-1-576-512_fa3.samples.
    jsonl) and, with 30 times the weight, to eight trees at 8, 16 and 32; since parts are merged
    faster than in these, `split`, `part` and `partial` are fitted to the trees alone
    (latent_h100.json), 5 % off, root mean square. Products bound it, and rates of decode steps and
    of many new tokens are the same.
    """

    narrow: float = 0.4125
    narrow_masked: float = 0.4512
    item: float = 2.656
    hbm: float = 2.723e6
    l2: float = 5.202e7
    fixed: float = 4.902
    split: float = 3.25
    part: float = 0.0291
    partial: float = 1.385e6
    overlap: float = 4.285

    products: ClassVar[tuple[float, float]] = (0.0, 0.0)


def rate_values(rates: KernelRates) -> tuple[float, ...]:
    """Return the rates as compiled loops take them: the fields in order, then narrow_rows and
    products."""
    return (*vars(rates).values(), float(rates.narrow_rows), *rates.products)
