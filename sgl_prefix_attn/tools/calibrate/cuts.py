"""Cuts of a batch (plan/tiles.py) whose times tell a kernel's rates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl_prefix_attn.plan.cut_time import part_costs, predict_us
from sgl_prefix_attn.plan.kernel_rates import KernelRates
from sgl_prefix_attn.plan.planner import HOPELESS, Planner
from sgl_prefix_attn.plan.tiles import Cut
from sgl_prefix_attn.records import Forest

MOST = 4  # of a batch


def chosen(planner: Planner, forest: Forest) -> list[Cut]:
    """Choose up to MOST cuts: the two that are predicted best, and others that the planner leaves,
    evenly up to hopeless ones. The same rates choose the same."""
    cuts = sorted(planner.cuts(forest), key=lambda cut: cut.us)
    cuts = [cut for cut in cuts if cut.us <= HOPELESS * cuts[0].us]
    if len(cuts) <= MOST:
        return cuts
    rest = np.linspace(2, len(cuts) - 1, MOST - 2).astype(int)
    return [*cuts[:2], *(cuts[i] for i in rest)]


def predict(
    cuts: Sequence[Cut], unique_tokens: int, planner: Planner, rates: KernelRates
) -> np.ndarray:
    """Predict the cuts of one batch by other rates than the planner's: microseconds per layer,
    float64 [cuts]."""
    heads, num_sms = planner.heads, planner.num_sms
    return np.array(
        [
            predict_us(
                cut.tiles, cut.leaves.query, part_costs(cut.tiles, heads, rates), cut.parts,
                unique_tokens, heads, num_sms, rates,
            )
            for cut in cuts
        ]
    )  # fmt: skip
