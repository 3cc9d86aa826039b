"""Forest -> the order in which its queries fill tiles, and where that order may be cut.

A query is one row of q: the token that a request decodes, or one of the tokens that it verifies or
prefills. Requests stand in the order of the tree's leaves and a request's queries one behind the
other, so that the queries below a node are a range of places, and those that see a new token are
the rest of its request's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.records import Forest


@dataclass(frozen=True)
class LeafOrder:
    """Queries with siblings side by side, Q of them.

    request      int32 [Q]  request at each place
    query        int32 [Q]  row of q at each place: rows are in the order of the batch
    after        int32 [Q]  queries of its request behind it, whose tokens it does not see
    first, last  int32 [N]  places [first, last) of the queries below each node
    root         int32 [Q]  place where the root of each place's request begins; unshared requests
                            of one query count as one root
    """

    request: np.ndarray
    query: np.ndarray
    after: np.ndarray
    first: np.ndarray
    last: np.ndarray
    root: np.ndarray


def order_leaves(forest: Forest, comes_last: np.ndarray | None = None) -> LeafOrder:
    """Lay out the depth-first order of the queries; O(N + Q). Below a node requests are in the
    order of the batch, those that come last (bool [B]) behind the others."""
    lens = forest.query_lens
    if lens is None:
        lens = np.ones(forest.tail_parent.size, np.int32)
    rows = np.arange(lens.size)
    if comes_last is not None:
        rows = np.argsort(comes_last, kind="stable")
    return LeafOrder(*_order(forest.parent, forest.tail_parent, lens, rows))


@cached_njit
def _order(parent, tail_parent, query_lens, rows):
    num_nodes, batch = parent.size, tail_parent.size
    count = np.zeros(num_nodes, np.int32)  # queries below each node
    for row in range(batch):
        if tail_parent[row] >= 0:
            count[tail_parent[row]] += query_lens[row]
    for node in range(num_nodes - 1, -1, -1):
        if parent[node] >= 0:
            count[parent[node]] += count[node]
    queries = query_lens.sum()
    first = np.empty(num_nodes, np.int32)
    free = np.empty(num_nodes + 1, np.int32)  # next place below a node; the last one: of the roots
    free[num_nodes] = 0
    root = np.empty(queries, np.int32)
    for node in range(num_nodes):
        above = parent[node] if parent[node] >= 0 else num_nodes
        first[node] = free[above]
        free[node] = free[above]
        free[above] += count[node]
        if parent[node] < 0:
            root[first[node] : first[node] + count[node]] = first[node]
    unshared = free[num_nodes]
    request = np.empty(queries, np.int32)
    query = np.empty(queries, np.int32)
    after = np.empty(queries, np.int32)
    begin = np.cumsum(query_lens) - query_lens
    for row in rows:
        above = tail_parent[row] if tail_parent[row] >= 0 else num_nodes
        place = free[above]
        for i in range(query_lens[row]):
            request[place + i] = row
            query[place + i] = begin[row] + i
            after[place + i] = query_lens[row] - 1 - i
            if above == num_nodes:
                root[place + i] = place if query_lens[row] > 1 else unshared
        free[above] += query_lens[row]
    return request, query, after, first, first + count, root


@cached_njit
def cut_evenly(queries: int, most: int) -> np.ndarray:
    """Return edges int32 [T+1] of the fewest tiles of up to `most` queries, all about as large."""
    tiles = -(-queries // most)
    edges = np.full(tiles + 1, queries, np.int32)
    for i in range(tiles):
        edges[i] = i * queries // tiles
    return edges


@cached_njit
def cut_at_roots(root: np.ndarray, most: int) -> np.ndarray:
    """Return the same for each root by itself: no tile holds requests of two."""
    edges = np.empty(root.size + 1, np.int32)
    count = 0
    first = 0
    while first < root.size:
        end = first + 1
        while end < root.size and root[end] == root[first]:
            end += 1
        tiles = -(-(end - first) // most)
        for i in range(tiles):
            edges[count] = first + i * (end - first) // tiles
            count += 1
        first = end
    edges[count] = root.size
    return edges[: count + 1].copy()


@cached_njit
def cut_at_requests(after: np.ndarray, most: int) -> np.ndarray:
    """Return edges of tiles of as many whole requests as `most` queries have room for; a request
    that is larger is cut evenly by itself (PackInfer's groups, in the order of the leaves)."""
    edges = np.empty(after.size + 1, np.int32)
    count, low, place = 0, 0, 0  # of the tile that is being filled: its first place
    while place < after.size:
        end = place + after[place] + 1
        if end - low > most and place > low:
            edges[count] = low
            count += 1
            low = place
        if end - place > most:
            tiles = -(-(end - place) // most)
            for i in range(tiles):
                edges[count] = place + i * (end - place) // tiles
                count += 1
            low = end
        place = end
    if low < after.size:
        edges[count] = low
        count += 1
    edges[count] = after.size
    return edges[: count + 1].copy()
