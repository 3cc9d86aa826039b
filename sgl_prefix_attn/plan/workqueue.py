"""Packs + tiling + splits -> the plan's int32 words (layout in kernels/layout.py)."""

import numpy as np
from numba import njit

from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.plan.tiles import Tiling
from sgl_prefix_attn.records import Forest, Packs, Plan, PlanStats, PlanWork

# Segments start at multiples of this many entries, so that their slots load as whole vectors.
SEGMENT_ALIGN = 16


def serialize(
    forest: Forest,
    packs: Packs,
    tiling: Tiling,
    splits: np.ndarray,
    work: PlanWork,
    *,
    headroom: int,
) -> Plan:
    """Lay out segments, partial rows and work items of a step; splits int32 [J] of its jobs.

    Every tail segment gets `headroom` spare entries (PackInfer's delta), so that requests can grow
    that many tokens before a new plan. Partial rows of a request stand together, in the order of
    its packs and splits; a request with one part writes to the output directly. Items of a tile
    stand together, longest first.
    """
    batch = forest.tail_parent.size
    words, index_slots, num_partials, num_items = _serialize(
        packs.kv_start, packs.kv_end, packs.tail, packs.query_offset, packs.queries, batch,
        tiling.pack_order, tiling.job_offset, tiling.tile, tiling.row_tiles,
        tiling.queries_per_tile, splits, np.argsort(-tiling.step_share / splits, kind="stable"),
        headroom,
    )  # fmt: skip
    kv_len = packs.kv_end - packs.kv_start
    stats = PlanStats(
        num_nodes=forest.parent.size,
        num_packs=kv_len.size,
        num_items=num_items,
        num_partials=num_partials,
        kv_tokens_read=int(kv_len.sum()),
        kv_tokens_query_centric=int(forest.seq_lens.sum()),
        kv_tokens_unique=forest.unique_tokens,
    )
    return Plan(
        words=words,
        batch_size=batch,
        num_index_slots=index_slots,
        num_partials=num_partials,
        appends_left=headroom,
        seq_lens=forest.seq_lens.copy(),
        stats=stats,
        work=work,
        forest=forest,
        packs=packs,
    )


# Not cached on disk: numba's cache does not see a change of the layout's constants.
@njit
def _serialize(
    kv_start, kv_end, tail, query_offset, queries, batch,
    pack_order, job_offset, tile, row_tiles, queries_per_tile, splits, job_order, headroom,
):  # fmt: skip
    num_packs, num_jobs = kv_start.size, tile.size
    pack_splits = np.empty(num_packs, np.int32)
    parts = np.zeros(batch, np.int32)
    tile_items = np.zeros(L.MAX_TILES, np.int32)
    num_items = 0
    for job in range(num_jobs):
        tile_items[tile[job]] += row_tiles[job] * splits[job]
        num_items += row_tiles[job] * splits[job]
        for i in range(job_offset[job], job_offset[job + 1]):
            pack = pack_order[i]
            pack_splits[pack] = splits[job]
            for e in range(query_offset[pack], query_offset[pack + 1]):
                parts[queries[e]] += splits[job]
    num_merges = np.count_nonzero(parts > 1)

    segments = L.HEADER_WORDS
    tails = segments + num_packs * L.SEGMENT_WORDS
    entries = tails + batch * L.TAIL_WORDS
    merges = entries + queries.size * L.ENTRY_WORDS
    items = merges + num_merges * L.MERGE_WORDS
    words = np.zeros(items + num_items * L.ITEM_WORDS, np.int32)
    words[L.H_VERSION] = L.VERSION
    words[L.H_BATCH] = batch
    words[L.H_SEGMENTS] = segments
    words[L.H_NUM_SEGMENTS] = num_packs
    words[L.H_TAILS] = tails
    words[L.H_ENTRIES] = entries
    words[L.H_MERGES] = merges
    words[L.H_NUM_MERGES] = num_merges

    # partial rows: a request's stand together
    partial = np.empty(batch, np.int32)
    num_partials = 0
    w = merges
    for row in range(batch):
        if parts[row] > 1:
            words[w + L.M_ROW] = row
            words[w + L.M_PARTIAL] = num_partials
            words[w + L.M_COUNT] = parts[row]
            w += L.MERGE_WORDS
            partial[row] = num_partials
            num_partials += parts[row]

    segment_dst = np.empty(num_packs, np.int32)
    dst = 0
    for pack in range(num_packs):
        length = kv_end[pack] - kv_start[pack]
        w = segments + pack * L.SEGMENT_WORDS
        words[w + L.S_DST] = dst
        words[w + L.S_ROW] = queries[query_offset[pack]]
        words[w + L.S_START] = kv_start[pack]
        words[w + L.S_LEN] = length
        segment_dst[pack] = dst
        dst += length
        if tail[pack] >= 0:
            w = tails + tail[pack] * L.TAIL_WORDS
            words[w + L.T_DST] = segment_dst[pack]
            words[w + L.T_START] = kv_start[pack]
            dst += headroom
        dst = -(-dst // SEGMENT_ALIGN) * SEGMENT_ALIGN

    # entries: the queries of a job stand together
    first_entry = np.empty(num_jobs, np.int32)
    num_queries = np.zeros(num_jobs, np.int32)
    w = entries
    for job in range(num_jobs):
        first_entry[job] = (w - entries) // L.ENTRY_WORDS
        for i in range(job_offset[job], job_offset[job + 1]):
            pack = pack_order[i]
            num_queries[job] += query_offset[pack + 1] - query_offset[pack]
            for e in range(query_offset[pack], query_offset[pack + 1]):
                row = queries[e]
                words[w + L.E_ROW] = row
                if parts[row] > 1:
                    words[w + L.E_PARTIAL] = partial[row]
                    partial[row] += pack_splits[pack]
                else:
                    words[w + L.E_PARTIAL] = L.DIRECT
                if tail[pack] >= 0:
                    words[w + L.E_DST] = segment_dst[pack]
                    words[w + L.E_START] = kv_start[pack]
                w += L.ENTRY_WORDS

    write = np.empty(L.MAX_TILES, np.int32)
    w = items
    for t in range(L.MAX_TILES):
        words[L.H_QUEUES + 2 * t] = w
        words[L.H_QUEUES + 2 * t + 1] = tile_items[t]
        write[t] = w
        w += tile_items[t] * L.ITEM_WORDS
    for job in job_order:
        pack = pack_order[job_offset[job]]
        t = tile[job]
        grows = tail[pack] >= 0
        for split in range(splits[job]):
            for row_tile in range(row_tiles[job]):
                first = row_tile * queries_per_tile[job]
                w = write[t]
                words[w + L.I_SEGMENT] = 0 if grows else segment_dst[pack]
                words[w + L.I_LEN] = L.GROWS if grows else kv_end[pack] - kv_start[pack]
                words[w + L.I_SPLIT] = split
                words[w + L.I_NUM_SPLITS] = splits[job]
                words[w + L.I_ENTRY] = first_entry[job] + first
                words[w + L.I_NUM_QUERIES] = min(queries_per_tile[job], num_queries[job] - first)
                write[t] = w + L.ITEM_WORDS
    return words, dst, num_partials, num_items
