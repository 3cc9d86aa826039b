"""Forest -> tiles of requests: consecutive queries that one work item attends for, and their KV.

Queries stand in the order of the tree's leaves (leaves.py), so that those below a node are a
range of them. A tile is a range of up to tile_rows / group_size queries with all the KV that they
need: KV that all of them see is read in whole, unmasked blocks; what is left over, nodes of some of
its queries and private tails are packed without gaps into masked blocks.

Of several tokens of one request each sees one column more than the one before: in a tile, what the
first of them sees is one run of KV, and each token behind it a run of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.leaves import LeafOrder
from sgl_prefix_attn.records import Forest, PlanStats

# Columns of Tiles.run.
R_REQUEST, R_START, R_LEN, R_FIRST, R_END = range(5)
# Columns of Tiles.blocks.
B_UNMASKED, B_MASKED, B_BOTH, B_SIDE0, B_SIDE1 = range(5)


@dataclass(frozen=True)
class Tiles:
    """Tiles of a step, T of them, with R runs of KV in all.

    edge    int32 [T+1]  tile t holds the places [edge[t], edge[t+1]) of a LeafOrder
    offset  int32 [T+1]  CSR offsets into run
    run     int32 [R,5]  request on whose row the KV stands, first KV position, tokens, and the
                         queries [first, end) of the tile that see them
    blocks  int32 [T,5]  unmasked and masked blocks; masked columns for rows of both halves of the
                         tile, of its first half only, of its second half only
    """

    edge: np.ndarray
    offset: np.ndarray
    run: np.ndarray
    blocks: np.ndarray

    def followed_by(self, others: Tiles) -> Tiles:
        """Return these tiles and then others, whose places count on."""
        return Tiles(
            np.concatenate((self.edge, others.edge[1:] + self.edge[-1])),
            np.concatenate((self.offset, others.offset[1:] + self.offset[-1])),
            np.concatenate((self.run, others.run)),
            np.concatenate((self.blocks, others.blocks)),
        )


NO_TILES = Tiles(
    np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros((0, 5), np.int32),
    np.zeros((0, 5), np.int32),
)  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """One way to cut a step: the order of its queries, tiles, parts int [T] of each tile, costs
    float [T] of each tile's blocks (cut_time.part_costs), and the predicted microseconds.

    The first split_off tiles hold nodes that are split off (split_nodes.py): their queries stand in
    `leaves` again, in the tiles behind, which hold all other KV and grow.
    """

    leaves: LeafOrder
    tiles: Tiles
    parts: np.ndarray
    costs: np.ndarray
    us: float
    split_off: int = 0

    @property
    def edge(self) -> np.ndarray:
        """The places between which its tiles stand."""
        return self.tiles.edge

    @property
    def most_queries(self) -> int:
        return int(np.diff(self.tiles.edge).max(initial=0))

    @property
    def num_blocks(self) -> int:
        """Count the blocks of KV that all tiles read, growth aside."""
        return int(self.tiles.blocks[:, : B_MASKED + 1].sum())

    def stats(self, forest: Forest) -> PlanStats:
        """What one layer reads: a tile loads each token of its runs once, however it is split."""
        items, partials, read = _count(
            self.leaves.query, self.tiles.edge, self.tiles.run, self.parts
        )
        return PlanStats(
            num_nodes=forest.parent.size,
            num_tiles=self.parts.size,
            num_items=items,
            num_partials=partials,
            kv_tokens_read=read,
            kv_tokens_query_centric=int(forest.seq_lens.sum()),
            kv_tokens_unique=forest.unique_tokens,
        )


@cached_njit
def parts_of_queries(query, edge, parts):
    """int [Q]: items that each row of q is in; query int [...] of the tiles' places."""
    count = np.zeros(query.max() + 1 if query.size else 0, np.int64)
    for t in range(parts.size):
        for place in range(edge[t], edge[t + 1]):
            count[query[place]] += parts[t]
    return count


@cached_njit
def _count(query, edge, run, parts):
    """Parts of all tiles, partial results of queries, and KV tokens read."""
    partials, read = 0, 0
    for count in parts_of_queries(query, edge, parts):
        if count > 1:
            partials += count
    for r in range(len(run)):
        read += run[r, R_LEN]
    return parts.sum(), partials, read


def make_tiles(forest: Forest, leaves: LeafOrder, edge: np.ndarray, group_size: int) -> Tiles:
    """Lay out runs and blocks of the tiles between the edges."""
    return Tiles(
        edge,
        *lay_out(
            forest.parent, forest.start, forest.end, forest.tail_parent, forest.tail_start,
            forest.seq_lens, leaves.request, leaves.after, leaves.first, leaves.last, edge,
            group_size,
        ),
    )  # fmt: skip


@cached_njit
def lay_out(
    parent, start, end, tail_parent, tail_start, seq_lens, request, after, first, last, edge, group
):
    """Do the work of make_tiles, for compiled callers: offset, run, blocks."""
    num_tiles, num_nodes = edge.size - 1, parent.size
    offset = np.zeros(num_tiles + 1, np.int32)
    run = np.empty((request.size + num_nodes + num_tiles, 5), np.int32)
    blocks = np.zeros((num_tiles, 5), np.int32)
    chain = np.empty(num_nodes, np.int32)
    seen = np.full(num_nodes, -1, np.int32)
    size = 0
    for t in range(num_tiles):
        low, high = edge[t], edge[t + 1]
        for place in range(low, high):
            row = request[place]
            another = place > low and request[place - 1] == row
            depth = 0
            node = -1 if another else tail_parent[row]
            while node >= 0 and seen[node] != t:
                seen[node] = t
                chain[depth] = node
                depth += 1
                node = parent[node]
            while size + depth + 1 > run.shape[0]:
                bigger = np.empty((2 * run.shape[0], 5), np.int32)
                bigger[:size] = run[:size]
                run = bigger
            for i in range(depth - 1, -1, -1):
                node = chain[i]
                size = _add_run(
                    run, offset[t], size, row, start[node], end[node],
                    max(first[node], low) - low, min(last[node], high) - low,
                )  # fmt: skip
            sees = seq_lens[row] - after[place]
            size = _add_run(
                run, offset[t], size, row, sees - 1 if another else tail_start[row], sees,
                place - low, min(place + after[place] + 1, high) - low,
            )  # fmt: skip
        offset[t + 1] = size
        count_blocks(run, offset[t], size, high - low, group, blocks[t])
    return offset, run[:size].copy(), blocks


@cached_njit
def _add_run(run, begin, size, request, start, end, first, last):
    """Add KV [start, end) of a request for queries [first, last) to the runs [begin, size) of its
    tile: to the last one where it goes on there, for the same queries."""
    if end == start:  # a node that is split off
        return size
    at = size - 1
    if (
        at >= begin
        and run[at, R_REQUEST] == request
        and run[at, R_START] + run[at, R_LEN] == start
        and run[at, R_FIRST] == first
        and run[at, R_END] == last
    ):
        run[at, R_LEN] += end - start
        return size
    run[size, R_REQUEST] = request
    run[size, R_START] = start
    run[size, R_LEN] = end - start
    run[size, R_FIRST] = first
    run[size, R_END] = last
    return size + 1


@cached_njit
def count_blocks(run, begin, end, queries, group, blocks):
    """Fill one row of Tiles.blocks from the runs [begin, end) of a tile of `queries`."""
    for r in range(begin, end):
        rest = run[r, R_LEN]
        if run[r, R_FIRST] == 0 and run[r, R_END] == queries:
            blocks[B_UNMASKED] += rest // W.BLOCK
            rest %= W.BLOCK
        blocks[B_BOTH + side_of(run[r, R_FIRST], run[r, R_END], queries, group)] += rest
    blocks[B_MASKED] = -(-(blocks[B_BOTH] + blocks[B_SIDE0] + blocks[B_SIDE1]) // W.BLOCK)


@cached_njit
def side_of(first, end, queries, group):
    """Tell which half of a tile's rows the queries [first, end) are in: 0 both, 1 the first, 2 the
    second. A tile that one warpgroup runs has no halves."""
    if queries * group <= W.HALF_ROWS or (first * group < W.HALF_ROWS < end * group):
        return 0
    return 1 if end * group <= W.HALF_ROWS else 2
