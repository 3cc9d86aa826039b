"""Prefix paths -> forest: keep the nodes that several requests share, drop the rest."""

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.records import Forest, PathTable


def build_forest(paths: PathTable, query_lens: np.ndarray | None = None) -> Forest:
    """Compress the paths of a batch into the forest of its shared nodes.

    A node with one request is part of that request's tail: splitting it off could save nothing. A
    node whose only child has the same requests is joined with the child. O(N + B).
    query_lens int32 [B]: how many tokens of each request attend, None: one.
    Raises ValueError, naming the row, when a path holds more than what comes before those tokens,
    and when there is no length or more than one of each path.
    """
    if paths.seq_lens.shape != paths.leaf.shape:
        raise ValueError(f"{paths.seq_lens.size} seq_lens of {paths.leaf.size} paths")
    room = paths.seq_lens - (1 if query_lens is None else query_lens)
    columns = _build(paths.parent, paths.length, paths.leaf, room)
    parent, start, end, num_queries, tail_parent, tail_start, row, too_long = columns
    if row >= 0:
        raise ValueError(
            f"paths[{row}] holds {too_long} tokens but seq_lens[{row}] is "
            f"{paths.seq_lens[row]}: a path must be shorter than its request, whose tokens that "
            "attend are private"
        )
    return Forest(
        parent, start, end, num_queries, tail_parent, tail_start, paths.seq_lens, query_lens
    )


@cached_njit
def _build(parent, length, leaf, room):
    """Columns of the forest, and the first request whose path is longer than its room with the
    path's tokens, else -1 and 0."""
    num_nodes, batch = parent.size, leaf.size
    depth = np.zeros(num_nodes, np.int32)  # KV position where the node ends
    count = np.zeros(num_nodes, np.int32)  # requests below the node
    for i in range(num_nodes):
        depth[i] = length[i] + (depth[parent[i]] if parent[i] >= 0 else 0)
    for row in range(batch):
        if leaf[row] >= 0:
            count[leaf[row]] += 1
    for i in range(num_nodes - 1, -1, -1):
        if parent[i] >= 0:
            count[parent[i]] += count[i]

    kept = np.full(num_nodes, -1, np.int32)  # original node -> forest node
    out_parent = np.empty(num_nodes, np.int32)
    start = np.empty(num_nodes, np.int32)
    end = np.empty(num_nodes, np.int32)
    queries = np.empty(num_nodes, np.int32)
    size = 0
    for i in range(num_nodes):
        if count[i] < 2:
            continue
        above = parent[i]
        if above >= 0 and count[above] == count[i]:
            kept[i] = kept[above]
        else:
            kept[i] = size
            out_parent[size] = kept[above] if above >= 0 else -1
            start[size] = depth[above] if above >= 0 else 0
            queries[size] = count[i]
            size += 1
        end[kept[i]] = depth[i]

    tail_parent = np.full(batch, -1, np.int32)
    tail_start = np.zeros(batch, np.int32)
    first, too_long = -1, 0
    for row in range(batch):
        node = leaf[row]
        path_len = depth[node] if node >= 0 else 0
        if path_len > room[row] and first < 0:
            first, too_long = row, path_len
        while node >= 0 and count[node] < 2:
            node = parent[node]
        if node >= 0:
            tail_parent[row] = kept[node]
            tail_start[row] = end[kept[node]]
    nodes = out_parent[:size], start[:size], end[:size], queries[:size]
    return nodes + (tail_parent, tail_start, first, too_long)
