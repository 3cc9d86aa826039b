"""Nodes that are split off: KV whose queries read it in tiles of its own, beside their other KV.

A node is merged where its KV is in the list of every tile below it, and split where it is an item
of its own, however the queries are cut into tiles below it. A Division says which stretches of KV
are split off, and leaves a forest of the rest, which is cut into tiles as any forest is. All
queries of a request belong to the same items.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.leaves import LeafOrder
from sgl_prefix_attn.plan.packs import make_packs
from sgl_prefix_attn.plan.tiles import (
    NO_TILES,
    R_END,
    R_FIRST,
    R_LEN,
    R_REQUEST,
    R_START,
    Tiles,
    count_blocks,
)
from sgl_prefix_attn.records import Forest, Packing


@dataclass(frozen=True)
class Division:
    """A step's KV: S stretches that are split off, and what is left.

    start, end  int32 [S]    KV positions of the stretch
    offset      int32 [S+1]  CSR offsets into places
    places      int32 [...]  the queries of each stretch, as places of the step's LeafOrder
    below       the forest without these stretches
    """

    start: np.ndarray
    end: np.ndarray
    offset: np.ndarray
    places: np.ndarray
    below: Forest

    @classmethod
    def merged(cls, forest: Forest) -> Division:
        """Nothing is split off."""
        none = np.zeros(0, np.int32)
        return cls(none, none, np.zeros(1, np.int32), none, forest)

    @classmethod
    def of_packing(cls, forest: Forest, leaves: LeafOrder, packing: Packing) -> Division:
        """The packs of a packing: those of nodes are split off, a request's own is what is left."""
        packs = make_packs(forest, packing)
        nodes = packs.tail.size - forest.tail_parent.size
        offset, places = _places_of(
            leaves.request, forest.tail_parent.size, packs.query_offset[: nodes + 1], packs.queries
        )
        none = np.zeros(0, np.int32)
        below = replace(
            forest, parent=none, start=none, end=none, num_queries=none,
            tail_parent=np.full_like(forest.tail_parent, -1), tail_start=packs.kv_start[nodes:],
        )  # fmt: skip
        return cls(packs.kv_start[:nodes], packs.kv_end[:nodes], offset, places, below)

    @classmethod
    def of_nodes(cls, forest: Forest, leaves: LeafOrder, split: np.ndarray) -> Division:
        """The nodes that are split, bool [N], and all others merged."""
        offset, places = _ranges(leaves.first[split], leaves.last[split])
        below = replace(forest, start=np.where(split, forest.end, forest.start))
        return cls(forest.start[split], forest.end[split], offset, places, below)

    def tiles(self, leaves: LeafOrder, most: int, group_size: int) -> tuple[LeafOrder, Tiles]:
        """Tiles of up to `most` queries over each stretch, and the order in which queries stand in
        these and then in the tiles of what is left."""
        if self.start.size == 0:
            return leaves, NO_TILES
        edge, run, blocks = _stretch_tiles(
            leaves.request, self.start, self.end, self.offset, self.places, most, group_size
        )
        order = replace(
            leaves,
            request=np.concatenate((leaves.request[self.places], leaves.request)),
            query=np.concatenate((leaves.query[self.places], leaves.query)),
        )
        return order, Tiles(edge, np.arange(edge.size, dtype=np.int32), run, blocks)


@cached_njit
def _places_of(request, batch, offset, requests):
    """The places of the requests of each stretch, in the order of the leaves; CSR."""
    first = np.full(batch, -1, np.int32)
    count = np.zeros(batch, np.int32)
    for place in range(request.size):
        if first[request[place]] < 0:
            first[request[place]] = place
        count[request[place]] += 1
    size = 0
    for row in requests[: offset[-1]]:
        size += count[row]
    places = np.empty(size, np.int32)
    out = np.zeros(offset.size, np.int32)
    at = 0
    for s in range(offset.size - 1):
        begin = at
        for row in requests[offset[s] : offset[s + 1]]:
            for i in range(count[row]):
                places[at] = first[row] + i
                at += 1
        places[begin:at].sort()
        out[s + 1] = at
    return out, places


@cached_njit
def _ranges(first, last):
    """The places [first, last) of each stretch; CSR."""
    offset = np.zeros(first.size + 1, np.int32)
    for s in range(first.size):
        offset[s + 1] = offset[s] + last[s] - first[s]
    places = np.empty(offset[-1], np.int32)
    for s in range(first.size):
        for i in range(last[s] - first[s]):
            places[offset[s] + i] = first[s] + i
    return offset, places


@cached_njit
def _stretch_tiles(request, start, end, offset, places, most, group):
    """Edges, runs and blocks of the tiles over each stretch, all about as large; one run each."""
    count = 0
    for s in range(start.size):
        count += -(-(offset[s + 1] - offset[s]) // most)
    edge = np.zeros(count + 1, np.int32)
    run = np.empty((count, 5), np.int32)
    blocks = np.zeros((count, 5), np.int32)
    t = 0
    for s in range(start.size):
        size = offset[s + 1] - offset[s]
        tiles = -(-size // most)
        for i in range(tiles):
            low = offset[s] + i * size // tiles
            high = offset[s] + (i + 1) * size // tiles
            edge[t + 1] = high
            run[t, R_REQUEST] = request[places[low]]
            run[t, R_START] = start[s]
            run[t, R_LEN] = end[s] - start[s]
            run[t, R_FIRST] = 0
            run[t, R_END] = high - low
            count_blocks(run, t, t + 1, high - low, group, blocks[t])
            t += 1
    return edge, run, blocks
