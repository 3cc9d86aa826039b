"""Forest + packing -> packs (PAT §5.1: which queries read which KV together)."""

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.records import Forest, Packing, Packs


def make_packs(forest: Forest, packing: Packing) -> Packs:
    """Make one pack per node that kept queries, then one per request for its tail.

    The packs that a request appears in cover its KV positions [0, seq_len) exactly once.
    """
    return Packs(
        *_make(
            forest.parent, forest.start, forest.end, forest.num_queries, forest.tail_parent,
            forest.tail_start, forest.seq_lens, packing.node, packing.tail,
        )
    )  # fmt: skip


@cached_njit
def _make(
    parent, start, end, num_queries, tail_parent, tail_start, seq_lens, node_merged, tail_merged
):
    num_nodes, batch = parent.size, tail_parent.size
    begin = start.copy()  # KV position where the node's pack begins
    above = parent.copy()  # node whose pack comes before the node's pack
    queries_left = num_queries.copy()
    for i in range(num_nodes):
        if node_merged[i]:
            begin[i] = begin[parent[i]]
            above[i] = above[parent[i]]
            queries_left[parent[i]] -= num_queries[i]
    for row in range(batch):
        if tail_merged[row]:
            queries_left[tail_parent[row]] -= 1

    pack_of = np.full(num_nodes, -1, np.int32)
    num_tiles = 0
    for i in range(num_nodes):
        if queries_left[i] > 0:
            pack_of[i] = num_tiles
            num_tiles += 1
    first_tail = num_tiles
    num_tiles += batch

    kv_start = np.empty(num_tiles, np.int32)
    kv_end = np.empty(num_tiles, np.int32)
    tail = np.full(num_tiles, -1, np.int32)
    offset = np.zeros(num_tiles + 1, np.int32)
    for i in range(num_nodes):
        if pack_of[i] >= 0:
            kv_start[pack_of[i]] = begin[i]
            kv_end[pack_of[i]] = end[i]
            offset[pack_of[i] + 1] = queries_left[i]
    for row in range(batch):
        pack = first_tail + row
        kv_start[pack] = begin[tail_parent[row]] if tail_merged[row] else tail_start[row]
        kv_end[pack] = seq_lens[row]
        tail[pack] = row
        offset[pack + 1] = 1
    for pack in range(num_tiles):
        offset[pack + 1] += offset[pack]

    fill = offset[:-1].copy()
    queries = np.empty(offset[-1], np.int32)
    for row in range(batch):
        queries[fill[first_tail + row]] = row
        node = tail_parent[row]
        if tail_merged[row]:
            node = above[node]
        while node >= 0:
            pack = pack_of[node]
            queries[fill[pack]] = row
            fill[pack] += 1
            node = above[node]
    return kv_start, kv_end, tail, offset, queries
