"""Split or merge, per node: the profit models behind one interface.

`Packing` says for every node and tail whether its pack absorbs the KV of the node above. The
strategies differ in nothing else, so that each ablation is one flag.
"""

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.dynamic import optimal_packing
from sgl_prefix_attn.records import CALIBRATED, Forest, Packing

# FastTree's released defaults (its cost model as published with the artifact): weights of padded
# query rows, padded KV and reduction, and its two tiles (queries, KV tokens).
FASTTREE_WEIGHTS = (0.66, 0.33, 0.1)
FASTTREE_TILES = ((64, 32), (16, 128))


def choose_packing(forest: Forest, strategy: str, costs: CostModel) -> Packing:
    """Decide every merge of the forest.

    query       everything merges: one pack per request, as a query-centric kernel does
    naive       nothing merges: one pack per node (ChunkAttention's two phases, PAT-naive)
    pat         PAT Algorithm 1: split where 4 * queries(child) < len(parent), else merge
    compute     FastTree's compute-oriented cost (PAT-compute)
    calibrated  the cheapest split/merge choice under `costs`, by dynamic programming
    """
    if strategy == "query":
        return Packing(forest.parent >= 0, forest.tail_parent >= 0)
    if strategy == "naive":
        return Packing(np.zeros(forest.parent.size, bool), np.zeros(forest.tail_parent.size, bool))
    if strategy == "pat":
        return _pat(forest)
    if strategy == "compute":
        return Packing(*_fasttree(
            forest.parent, forest.start, forest.end, forest.num_queries, forest.tail_parent,
            forest.tail_start, forest.seq_lens, costs.group_size,
        ))  # fmt: skip
    assert strategy == CALIBRATED, strategy
    return optimal_packing(forest, costs)


def _pat(forest: Forest) -> Packing:
    """Algorithm 1 as printed: the parent's own length decides, not the length of a merged chain."""
    length = forest.end - forest.start
    node, tail = forest.parent >= 0, forest.tail_parent >= 0
    node[node] = 4 * forest.num_queries[node] >= length[forest.parent[node]]
    tail[tail] = 4 >= length[forest.tail_parent[tail]]
    return Packing(node, tail)


@cached_njit
def _padding_cost(queries, kv_len, group_size):
    large, small = FASTTREE_TILES
    tile_q, tile_k = large if queries > small[0] else small
    pad_q = (-queries) % tile_q
    pad_k = max(0, tile_k - kv_len)
    rows, tokens, _ = FASTTREE_WEIGHTS
    return group_size * (rows * pad_q * kv_len + tokens * pad_k * queries)


@cached_njit
def _fasttree(parent, start, end, num_queries, tail_parent, tail_start, seq_lens, group_size):
    """Top-down and greedy: a merged child leaves its parent with fewer queries and grows itself."""
    num_nodes = parent.size
    kv_len = (end - start).astype(np.int64)
    left = num_queries.astype(np.int64)  # queries still in the node's own pack
    node_merged = np.zeros(num_nodes, np.bool_)
    tail_merged = np.zeros(tail_parent.size, np.bool_)
    for child in range(num_nodes + tail_parent.size):
        is_tail = child >= num_nodes
        row = child - num_nodes
        above = tail_parent[row] if is_tail else parent[child]
        if above < 0:
            continue
        queries = 1 if is_tail else num_queries[child]
        own = seq_lens[row] - tail_start[row] if is_tail else kv_len[child]
        split = (
            _padding_cost(left[above], kv_len[above], group_size)
            + _padding_cost(queries, own, group_size)
            + FASTTREE_WEIGHTS[2] * queries
        )
        rest = left[above] - queries
        merge = _padding_cost(queries, own + kv_len[above], group_size)
        if rest > 0:
            merge += _padding_cost(rest, kv_len[above], group_size)
        if split > merge:
            left[above] = rest
            if is_tail:
                tail_merged[row] = True
            else:
                node_merged[child] = True
                kv_len[child] += kv_len[above]
    return node_merged, tail_merged
