"""Aligned tiles: the part, block and column of a row's KV follow from its position alone.

KV position p of a row is column p % BLOCK of a block, which holds no other positions of that row;
a row's blocks are read in the order of their positions, and are in part p // part_tokens of its
tile. Blocks and parts that are for other rows only change nothing of its results, to the last bit,
in kernels that rescale each row by itself and keep partial results in float32. So a request's
results are the same whatever else its batch holds, and however the batch is cut.

What is shared up to the middle of a block is read there by each of its requests for itself: nodes
begin and end at multiples of BLOCK.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.tiles import (
    B_BOTH,
    B_MASKED,
    B_SIDE0,
    B_SIDE1,
    B_UNMASKED,
    R_END,
    R_FIRST,
    R_LEN,
    R_START,
    Cut,
    side_of,
)
from sgl_prefix_attn.records import Forest, PlanStats


@dataclass(frozen=True, kw_only=True)
class AlignedCut(Cut):
    """A cut whose tiles are the parts themselves, which stand beside their tile's other ones.

    part  int32 [T]  which part of its tile each is
    """

    part: np.ndarray

    def stats(self, forest: Forest) -> PlanStats:
        return replace(super().stats(forest), num_tiles=int((self.part == 0).sum()))


def at_blocks(forest: Forest) -> Forest:
    """Return the forest with nodes that begin and end at multiples of BLOCK; some hold nothing."""
    start, end, tail_start = (
        x // W.BLOCK * W.BLOCK for x in (forest.start, forest.end, forest.tail_start)
    )
    return replace(forest, start=start, end=end, tail_start=tail_start)


@cached_njit
def divide(edge, offset, run, part_tokens, headroom, group):
    """Divide tiles (as of lay_out) into the parts that they have within `headroom` steps.

    Returns their number in each tile, edges of places that are repeated for each part, the places,
    and offset, run and blocks of the parts, as Tiles has them.
    """
    tiles = edge.size - 1
    parts = np.empty(tiles, np.int64)
    num_places, num_runs = 0, 0
    for t in range(tiles):
        end = 0
        for r in range(offset[t], offset[t + 1]):
            start, behind = run[r, R_START], run[r, R_START] + run[r, R_LEN]
            end = max(end, behind)
            num_runs += (behind - 1) // part_tokens - start // part_tokens + 1
        parts[t] = (end + headroom - 1) // part_tokens + 1
        num_places += parts[t] * (edge[t + 1] - edge[t])
    total = parts.sum()
    places = np.empty(num_places, np.int32)
    edges, offsets = np.zeros(total + 1, np.int32), np.zeros(total + 1, np.int32)
    runs, blocks = np.empty((num_runs, 5), np.int32), np.zeros((total, 5), np.int32)
    p, size = 0, 0
    for t in range(tiles):
        queries = edge[t + 1] - edge[t]
        for part in range(parts[t]):
            for i in range(queries):
                places[edges[p] + i] = edge[t] + i
            for r in range(offset[t], offset[t + 1]):
                start = max(run[r, R_START], part * part_tokens)
                end = min(run[r, R_START] + run[r, R_LEN], (part + 1) * part_tokens)
                if start < end:
                    runs[size] = run[r]
                    runs[size, R_START], runs[size, R_LEN] = start, end - start
                    size += 1
            edges[p + 1], offsets[p + 1] = edges[p] + queries, size
            _count_blocks(runs, offsets[p], size, queries, group, blocks[p])
            p += 1
    return parts, edges, places, offsets, runs, blocks


@cached_njit
def whole_columns(run, queries):
    """Count the columns of a run that are in unmasked blocks."""
    for_all = run[R_FIRST] == 0 and run[R_END] == queries
    return run[R_LEN] // W.BLOCK * W.BLOCK if for_all else 0


@cached_njit
def goes_on(run):
    """Tell whether a run goes on in the block of the one before: a token behind others of its
    request, for fewer queries."""
    return run[R_START] % W.BLOCK != 0


@cached_njit
def _count_blocks(run, begin, end, queries, group, blocks):
    """Fill one row of Tiles.blocks from the runs [begin, end): each has masked blocks to itself."""
    for r in range(begin, end):
        if goes_on(run[r]):
            continue
        whole = whole_columns(run[r], queries)
        side = side_of(run[r, R_FIRST], run[r, R_END], queries, group)
        blocks[B_UNMASKED] += whole // W.BLOCK
        blocks[B_BOTH + side] += -(-(run[r, R_LEN] - whole) // W.BLOCK) * W.BLOCK
    columns = blocks[B_BOTH] + blocks[B_SIDE0] + blocks[B_SIDE1]
    blocks[B_MASKED] = columns // W.BLOCK
