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
        cost = np.repeat(tokens[chosen], items[chosen]) + ITEM_TOKENS
        return busiest_cta(cost, 1, slots)

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
def busiest_cta(cost, repeats, slots):
    """When the last of `slots` CTAs is done, if each takes the next piece of work when it is free:
    cost float [n] of the pieces in their order, all of them handed out `repeats` times in turn."""
    free = [0.0 for _ in range(min(slots, cost.size * repeats))]
    last = 0.0
    for _ in range(repeats):
        for piece in cost:
            end = free[0] + piece
            heapq.heapreplace(free, end)
            last = max(last, end)
    return last
