"""Into how many KV splits each job is cut (PAT §6): what the estimated time likes best.

Few splits leave a CTA with a long item while others have none; many cost partial results. In
between, what matters is how items fill rounds of CTAs, which no rule of proportion sees: so a
few proportions are tried, and their queues simulated.
"""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.estimate import estimated_us
from sgl_prefix_attn.plan.tiles import TileSet, Tiling
from sgl_prefix_attn.plan.work import plan_work
from sgl_prefix_attn.records import Packs, PlanWork


def split_jobs(
    packs: Packs, tiling: Tiling, tile_set: TileSet, costs: CostModel
) -> tuple[np.ndarray, PlanWork]:
    """Choose KV splits int32 [J] of every job; returns the work that they make too.

    For each of TileSet.longest, a job is cut so that none of its items takes longer than that
    share of the step (an occupancy-aware form of PAT's mean rule).
    """
    candidates: dict[bytes, np.ndarray] = {}
    for share in tile_set.longest:
        wanted = np.ceil(tiling.step_share / share)
        splits = np.clip(wanted, 1, tiling.most_splits).astype(np.int32)
        candidates.setdefault(splits.tobytes(), splits)
    works = [
        (splits, plan_work(packs, tiling, splits, tile_set, costs.num_kv_heads))
        for splits in candidates.values()
    ]
    return min(works, key=lambda one: estimated_us(one[1], costs))
