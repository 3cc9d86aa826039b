"""Into how many KV splits each job is cut (PAT §6): what the estimated time likes best.

Few splits leave a CTA with a long item while others have none; many cost partial results. In
between, what matters is how items fill rounds of CTAs, which no rule of proportion sees: so a
few proportions are tried, and their queues simulated.
"""

import numpy as np

from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.estimate import estimated_us
from sgl_prefix_attn.plan.tiles import TileSet, Tiling
from sgl_prefix_attn.plan.work import plan_work
from sgl_prefix_attn.records import Packs, PlanWork


def split_jobs(
    packs: Packs, tiling: Tiling, tile_set: TileSet, costs: CostModel, most_partials: int
) -> tuple[np.ndarray, PlanWork]:
    """Choose KV splits int32 [J] of every job; returns the work that they make too.

    For each of TileSet.longest, a job is cut so that none of its items takes longer than that
    share of the step (an occupancy-aware form of PAT's mean rule). Where all of them make more than
    most_partials partial rows, items become longer until they do not, or nothing is cut.
    """

    def cut(share: float) -> np.ndarray:
        wanted = np.ceil(tiling.step_share / share)
        return np.clip(wanted, 1, tiling.most_splits).astype(np.int32)

    def work_of(splits: np.ndarray) -> PlanWork:
        return plan_work(packs, tiling, splits, tile_set, costs.num_kv_heads)

    candidates = {splits.tobytes(): splits for splits in map(cut, tile_set.longest)}
    works = [(splits, work_of(splits)) for splits in candidates.values()]
    share = max(tile_set.longest)
    while all(work.partials > most_partials for _, work in works) and works[-1][0].max() > 1:
        share *= 2
        works.append((splits := cut(share), work_of(splits)))
    fitting = [one for one in works if one[1].partials <= most_partials]
    return min(fitting or works[-1:], key=lambda one: estimated_us(one[1], costs))
