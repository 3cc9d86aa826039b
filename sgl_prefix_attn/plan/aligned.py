"""Aligned tiles: the part, block and column of a row's KV follow from its position alone.

KV position p of a row is column p % BLOCK of a block, which holds no other positions of that row;
a row's blocks are read in the order of their positions, and are in part p // part_tokens of its
tile; of a row shorter than whole_below() all are in part 0, because a second part would cost more
than it saves. Blocks and parts that are for other rows only change nothing of its results, to the
last bit, in kernels that rescale each row by itself and keep partial results in float32. So a
request's results are the same whatever else its batch holds, and however the batch is cut.

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
    R_REQUEST,
    R_START,
    Cut,
    side_of,
)
from sgl_prefix_attn.records import Forest, PlanStats


@dataclass(frozen=True, kw_only=True)
class AlignedCut(Cut):
    """A cut whose tiles are the parts themselves, which stand beside their tile's other ones.

    part   int32 [T]  which part of its tile each is
    whole  int32 [.]  edges of the tiles that were divided
    headroom          steps that its plan may grow by
    """

    part: np.ndarray
    whole: np.ndarray
    headroom: int

    @property
    def edge(self) -> np.ndarray:
        return self.whole

    def stats(self, forest: Forest) -> PlanStats:
        return replace(super().stats(forest), num_tiles=int((self.part == 0).sum()))


def at_blocks(forest: Forest) -> Forest:
    """Return the forest with nodes that begin and end at multiples of BLOCK; some hold nothing."""
    start, end, tail_start = (
        x // W.BLOCK * W.BLOCK for x in (forest.start, forest.end, forest.tail_start)
    )
    return replace(forest, start=start, end=end, tail_start=tail_start)


@cached_njit
def whole_below(part_tokens):
    """Return the length from which on a row has several parts."""
    return part_tokens + part_tokens // 2


@cached_njit
def divide(edge, offset, run, is_whole, part_tokens, headroom, group):
    """Divide tiles (as of lay_out) into the parts that they have within `headroom` steps.

    is_whole: bool [Q], the places of rows that have one part, and stay so within these steps.

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
            pieces = (behind - 1) // part_tokens - start // part_tokens + 1
            one = pieces == 1 and start < part_tokens
            num_runs += 1 if one else pieces * _kinds(run, r, is_whole, edge[t])
        has_one = is_whole[edge[t] : edge[t + 1]].all()
        parts[t] = 1 if has_one else (end + headroom - 1) // part_tokens + 1
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
                if parts[t] == 1:
                    runs[size] = run[r]
                    size += 1
                else:
                    size = _add_pieces(runs, size, run, r, is_whole, edge[t], part, part_tokens)
            edges[p + 1], offsets[p + 1] = edges[p] + queries, size
            _count_blocks(runs, offsets[p], size, queries, group, blocks[p])
            p += 1
    return parts, edges, places, offsets, runs[:size].copy(), blocks


@cached_njit
def _end_of_kind(is_whole, low, first, end):
    """Return the end of the queries [first, end) of a tile, which is at the places from `low` on,
    that are, or are not, whole as `first` is."""
    last = first + 1
    while last < end and is_whole[low + last] == is_whole[low + first]:
        last += 1
    return last


@cached_njit
def _kinds(run, r, is_whole, low):
    """Count the stretches of queries of a tile's run that are whole, or are not."""
    count, first, end = 0, run[r, R_FIRST], run[r, R_END]
    while first < end:
        first = _end_of_kind(is_whole, low, first, end)
        count += 1
    return count


@cached_njit
def _add_pieces(runs, size, run, r, is_whole, low, part, part_tokens):
    """Add what of a run is in one of the parts of its tile, which is at the places from `low` on,
    to runs. Positions of the first part are there for all queries, those behind it for each as it
    is."""
    request, start, first, last = run[r, R_REQUEST], run[r, R_START], run[r, R_FIRST], run[r, R_END]
    end = start + run[r, R_LEN]
    if part == 0:
        size = _add(runs, size, request, start, min(end, part_tokens), first, last)
    if end <= part_tokens:
        return size
    begin, behind = max(start, part * part_tokens), min(end, (part + 1) * part_tokens)
    while first < last:
        next_kind = _end_of_kind(is_whole, low, first, last)
        if is_whole[low + first] and part == 0:
            size = _add(runs, size, request, max(start, part_tokens), end, first, next_kind)
        elif part > 0 and not is_whole[low + first]:
            size = _add(runs, size, request, begin, behind, first, next_kind)
        first = next_kind
    return size


@cached_njit
def _add(runs, size, request, start, end, first, last):
    if start < end:
        runs[size, R_REQUEST], runs[size, R_START], runs[size, R_LEN] = request, start, end - start
        runs[size, R_FIRST], runs[size, R_END] = first, last
        size += 1
    return size


@cached_njit
def whole_columns(run, r, queries):
    """Count the columns of run r that are in unmasked blocks."""
    for_all = run[r, R_FIRST] == 0 and run[r, R_END] == queries
    return run[r, R_LEN] // W.BLOCK * W.BLOCK if for_all else 0


@cached_njit
def goes_on(run, r):
    """Tell whether run r goes on in the block of the one before: a token behind others of its
    request, for fewer queries."""
    return run[r, R_START] % W.BLOCK != 0


@cached_njit
def _count_blocks(run, begin, end, queries, group, blocks):
    """Fill one row of Tiles.blocks from the runs [begin, end): each has masked blocks to itself."""
    for r in range(begin, end):
        if goes_on(run, r):
            continue
        whole = whole_columns(run, r, queries)
        side = side_of(run[r, R_FIRST], run[r, R_END], queries, group)
        blocks[B_UNMASKED] += whole // W.BLOCK
        blocks[B_BOTH + side] += -(-(run[r, R_LEN] - whole) // W.BLOCK) * W.BLOCK
    columns = blocks[B_BOTH] + blocks[B_SIDE0] + blocks[B_SIDE1]
    blocks[B_MASKED] = columns // W.BLOCK
