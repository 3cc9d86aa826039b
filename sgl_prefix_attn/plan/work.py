"""How much work a plan is: what its time is predicted from."""

import heapq

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.tiles import TileSet, Tiling
from sgl_prefix_attn.records import Packs, PlanWork

# CTAs that an SM holds of a tails tile and of a shared tile: their registers and shared memory.
TAIL_CTAS, SHARED_CTAS = 4, 3
# How many tails CTAs an SM holds fewer beside its first shared CTA, and beside each further one.
BESIDE_FIRST, BESIDE_OTHERS = 2, 1
# A KV token takes a shared CTA this much of what it takes a tails CTA.
SHARED_TOKEN = 0.7
# What a work item costs a CTA besides its KV, in KV tokens of one head.
ITEM_TOKENS = 50


def plan_work(
    packs: Packs, tiling: Tiling, splits: np.ndarray, tile_set: TileSet, num_kv_heads: int
) -> PlanWork:
    """Total a plan whose jobs have `splits` int32 [J] KV splits, and how long its longest
    chains of work items are."""
    return PlanWork(
        *_plan_work(
            packs.query_offset, packs.queries, tiling.pack_order, tiling.job_offset, tiling.tile,
            tiling.row_tiles, tiling.tokens, splits, tile_set.block_m, tile_set.block_n,
            tile_set.first_shared, tile_set.num_sms, num_kv_heads,
        )
    )  # fmt: skip


@cached_njit
def _plan_work(
    query_offset, queries, pack_order, job_offset, tile, row_tiles, tokens, splits,
    block_m, block_n, first_shared, num_sms, num_kv_heads,
):  # fmt: skip
    """Return the fields of PlanWork, in their order."""
    num_jobs = tile.size
    parts = np.zeros(queries.max() + 1 if queries.size else 0, np.int64)
    item_tokens = np.empty(num_jobs, np.int64)
    tail_tokens, shared_tokens, reread_tokens, shared_rows = 0, 0, 0, 0
    tail_items, shared_items = 0, 0
    for job in range(num_jobs):
        length, rows, t = np.int64(tokens[job]), np.int64(row_tiles[job]), tile[job]
        blocks = -(-length // (splits[job] * block_n[t]))
        item_tokens[job] = blocks * block_n[t] + ITEM_TOKENS
        if t < first_shared:
            tail_tokens += length
            tail_items += rows * splits[job]
        else:
            shared_tokens += length
            reread_tokens += length * (rows - 1)
            shared_rows += length * rows * block_m[t]
            shared_items += rows * splits[job]
        for pack in pack_order[job_offset[job] : job_offset[job + 1]]:
            for query in queries[query_offset[pack] : query_offset[pack + 1]]:
                parts[query] += splits[job]

    tail_queue, shared_queue = np.empty(tail_items), np.empty(shared_items)
    tail_items, shared_items = 0, 0
    for job in np.argsort(-item_tokens, kind="mergesort"):
        for _ in range(row_tiles[job] * splits[job]):
            if tile[job] < first_shared:
                tail_queue[tail_items] = item_tokens[job]
                tail_items += 1
            else:
                shared_queue[shared_items] = item_tokens[job] * SHARED_TOKEN
                shared_items += 1
    tail_chain, shared_chain = _chains(tail_queue, shared_queue, num_sms, num_kv_heads)
    parts = parts[parts > 1]
    return (
        tail_tokens, shared_tokens, reread_tokens, shared_rows, tail_items, shared_items,
        tail_chain, shared_chain, parts.sum(), parts.max() if parts.size else 0,
    )  # fmt: skip


@cached_njit
def _chains(tails, shared, num_sms, num_kv_heads):
    """When the last tails CTA and the last shared CTA of one KV head, which has its share of the
    CTAs, are done with these items. Shared CTAs are launched first, and tails CTAs that found no
    room start when they end."""
    shared_ends = np.zeros(max(1, num_sms * SHARED_CTAS // num_kv_heads))
    tail_starts = np.zeros(max(1, num_sms * TAIL_CTAS // num_kv_heads))
    shared_chain = run_queue(shared, 1, shared_ends)
    sms = max(1, num_sms // num_kv_heads)
    waiting = 0
    for i, end in enumerate(np.sort(shared_ends)[::-1]):
        for _ in range(BESIDE_FIRST if i < sms else BESIDE_OTHERS):
            if waiting < tail_starts.size:
                tail_starts[waiting] = end
                waiting += 1
    return run_queue(tails, 1, tail_starts), shared_chain


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
