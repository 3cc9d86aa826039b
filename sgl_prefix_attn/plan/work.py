"""How much work a plan is: what its time is predicted from."""

from __future__ import annotations

import heapq

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.tiles import TileSet, Tiling
from sgl_prefix_attn.records import HeadConfig, PlanWork

# CTAs that an SM holds of a tails tile and of a shared tile: their registers and shared memory.
TAIL_CTAS, SHARED_CTAS = 4, 3
# How many tails CTAs an SM holds fewer beside its first shared CTA, and beside each further one.
DISPLACED = (2, 1)
# A KV token takes a shared CTA this much of what it takes a tails CTA.
SHARED_TOKEN = 0.7
# What a work item costs a CTA besides its KV, in KV tokens of one head.
ITEM_TOKENS = 50


def plan_work(
    tiling: Tiling, num_partials: int, most_parts: int, tile_set: TileSet, heads: HeadConfig
) -> PlanWork:
    """Totals of a plan's jobs, and how long its longest chain of work items is."""
    first_shared = len(tile_set.tiles) - len(tile_set.shared)
    shared = tiling.tile >= first_shared
    block_m = np.array([tile.block_m for tile in tile_set.tiles])[tiling.tile]
    block_n = np.array([tile.block_n for tile in tile_set.tiles])[tiling.tile]
    items = tiling.row_tiles * tiling.splits
    tokens = np.ceil(tiling.tokens / tiling.splits / block_n) * block_n
    tail_chain, shared_chain = _chains(tokens, items, shared, tile_set.num_sms, heads.num_kv_heads)
    return PlanWork(
        tail_tokens=int(tiling.tokens[~shared].sum()),
        shared_tokens=int(tiling.tokens[shared].sum()),
        reread_tokens=int((tiling.tokens * (tiling.row_tiles - 1))[shared].sum()),
        shared_rows=int((tiling.tokens * tiling.row_tiles * block_m)[shared].sum()),
        tail_items=int(items[~shared].sum()),
        shared_items=int(items[shared].sum()),
        tail_chain=tail_chain,
        shared_chain=shared_chain,
        partials=num_partials,
        most_parts=most_parts,
    )


def _chains(tokens, items, shared, num_sms: int, num_kv_heads: int) -> tuple[float, float]:
    """When the last tails CTA and the last shared CTA are done, in KV tokens: tokens float [J] of
    each job's items, items int [J], shared bool [J]. Of one KV head, which has its share of the
    CTAs. Shared CTAs are launched first, and tails CTAs that found no room start when they end."""
    order = np.argsort(-tokens, kind="stable")

    def queue(mask: np.ndarray) -> np.ndarray:
        chosen = order[mask[order]]
        return np.repeat(tokens[chosen], items[chosen]) + ITEM_TOKENS

    def ctas(per_sm: int) -> int:
        return max(1, num_sms * per_sm // num_kv_heads)

    shared_ends = np.zeros(ctas(SHARED_CTAS))
    shared_chain = run_queue(queue(shared), 1, shared_ends)
    until = np.sort(shared_ends)[::-1] * SHARED_TOKEN
    beside_first, beside_others = until[: ctas(1)], until[ctas(1) :]
    waits = np.concatenate(
        [np.repeat(beside_first, DISPLACED[0]), np.repeat(beside_others, DISPLACED[1])]
    )
    tail_starts = np.zeros(ctas(TAIL_CTAS))
    tail_starts[: waits.size] = waits[: tail_starts.size]
    return run_queue(queue(~shared), 1, tail_starts), shared_chain


@cached_njit
def run_queue(cost, repeats, free):
    """When the last piece of work is done, if each goes to the CTA that is free first: cost float
    [n] of the pieces in their order, all of them handed out `repeats` times in turn. `free` float
    [slots], when each CTA is free, is brought up to date, in another order."""
    heap = list(free)
    heapq.heapify(heap)
    last = 0.0
    for _ in range(repeats):
        for piece in cost:
            end = heap[0] + piece
            heapq.heapreplace(heap, end)
            last = max(last, end)
    for i in range(free.size):
        free[i] = heap[i]
    return last
