"""How much work a plan is: what its time is predicted from."""

from __future__ import annotations

import heapq

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.tiles import TileSet, Tiling
from sgl_prefix_attn.records import HeadConfig, PlanWork

# CTAs that an SM holds of a tails tile and of a shared tile: their registers and shared memory.
TAIL_CTAS, SHARED_CTAS = 4, 3
# What a work item costs a CTA besides its KV, in KV tokens of one head.
ITEM_TOKENS = 50


def plan_work(tiling: Tiling, num_partials: int, tile_set: TileSet, heads: HeadConfig) -> PlanWork:
    """Totals of a plan's jobs, and how long its longest chain of work items is."""
    first_shared = len(tile_set.tiles) - len(tile_set.shared)
    shared = tiling.tile >= first_shared
    block_m = np.array([tile.block_m for tile in tile_set.tiles])[tiling.tile]
    block_n = np.array([tile.block_n for tile in tile_set.tiles])[tiling.tile]
    items = tiling.row_tiles * tiling.splits
    tokens = np.ceil(tiling.tokens / tiling.splits / block_n) * block_n
    order = np.argsort(-tokens, kind="stable")

    def longest(mask: np.ndarray, ctas: int) -> float:
        chosen = order[mask[order]]
        slots = max(1, tile_set.num_sms * ctas // heads.num_kv_heads)
        return _busiest_cta(np.repeat(tokens[chosen], items[chosen]), slots)

    return PlanWork(
        tail_tokens=int(tiling.tokens[~shared].sum()),
        shared_tokens=int(tiling.tokens[shared].sum()),
        reread_tokens=int((tiling.tokens * (tiling.row_tiles - 1))[shared].sum()),
        shared_rows=int((tiling.tokens * tiling.row_tiles * block_m)[shared].sum()),
        tail_items=int(items[~shared].sum()),
        shared_items=int(items[shared].sum()),
        tail_chain=longest(~shared, TAIL_CTAS),
        shared_chain=longest(shared, SHARED_CTAS),
        partials=num_partials,
    )


@cached_njit
def _busiest_cta(tokens, slots):
    """KV tokens on the busiest of `slots` CTAs, its items' fixed cost included: tokens float [n] of
    the items in the queue's order. As in the kernels, a CTA takes its next item when it starts one,
    so that the heaviest item is followed by the heaviest of the second round."""
    starts = [(0.0, cta) for cta in range(min(slots, tokens.size))]  # when, and which item
    taken, last = slots, 0.0
    while len(starts) > 0:
        start, item = heapq.heappop(starts)
        end = start + tokens[item] + ITEM_TOKENS
        last = max(last, end)
        if taken < tokens.size:
            heapq.heappush(starts, (end, taken))
            taken += 1
    return last
