"""Row tiles and their parts -> the plan's int32 words (layout in kernels/gluon/words.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.plan.row_tile_order import (
    block_at,
    masked_sequence,
    order_blocks,
    sides_of,
)
from sgl_prefix_attn.plan.row_tiles import (
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

_make_key = njit(W.make_key)


@dataclass(frozen=True)
class RowTilePlan:
    """One step as row tiles, a StepPlan.

    words         int32 [...]  layout in kernels/gluon/words.py
    num_blocks    blocks of slots and keys that the step needs, growth included
    num_partial_tiles  partial results of TILE_ROWS rows for each KV head, and
    num_counters  pairs of counters a KV head that it needs
    group_size    query heads a KV head
    predicted_us  microseconds per layer
    """

    words: np.ndarray
    batch_size: int
    num_blocks: int
    num_partial_tiles: int
    num_counters: int
    group_size: int
    longest: int
    appends_left: int
    stats: PlanStats
    predicted_us: float

    @property
    def num_index_slots(self) -> int:
        """Entries of slots, and of keys."""
        return self.num_blocks * W.BLOCK

    @property
    def num_partials(self) -> int:
        """Partial rows of all query heads that hold as much as the partial tiles."""
        return -(-self.num_partial_tiles * W.TILE_ROWS // self.group_size)

    @property
    def num_items(self) -> int:
        return int(self.words[W.H_NUM_ITEMS])


def serialize_row_tiles(forest: Forest, cut: Cut, group_size: int, headroom: int) -> RowTilePlan:
    """Lay out items, blocks and growth columns of a step that is cut so; a tile has at most as many
    parts as blocks.

    Unmasked and masked blocks of a part take turns, each spread evenly over it: products and the
    loads of private KV then overlap within an item.
    """
    tiles = cut.tiles
    words, num_blocks, num_partial_tiles, num_counters, longest = _serialize(
        cut.leaves.request, cut.leaves.query, tiles.edge, tiles.offset, tiles.run, tiles.blocks,
        cut.parts, cut.costs, forest.seq_lens, W.item_words(group_size), group_size, headroom,
    )  # fmt: skip
    return RowTilePlan(
        words=words,
        batch_size=forest.tail_parent.size,
        num_blocks=num_blocks,
        num_partial_tiles=num_partial_tiles,
        num_counters=num_counters,
        group_size=group_size,
        longest=longest,
        appends_left=headroom,
        stats=cut.stats(forest),
        predicted_us=cut.us,
    )


# Not cached on disk: numba's cache does not see a change of the layout's constants.
@njit
def _serialize(
    request, query, edge, offset, run, blocks, parts, costs, seq_lens, item_words, group, headroom,
):  # fmt: skip
    num_tiles, batch = edge.size - 1, seq_lens.size
    num_items, flag_words, order_words, num_segments = 0, 0, 0, 0
    for t in range(num_tiles):
        count = blocks[t, B_UNMASKED] + blocks[t, B_MASKED]
        num_items += parts[t]
        flag_words += count // W.FLAGS_PER_WORD + 2 * parts[t]
        order_words += count + -(-(edge[t + 1] - edge[t]) * headroom // W.BLOCK)
        num_segments += 2 * (offset[t + 1] - offset[t]) + 2
    flags = W.HEADER_WORDS + num_items * item_words
    order = flags + flag_words
    growths = order + order_words
    segments = growths + batch * W.GROWTH_WORDS
    words = np.zeros(segments + num_segments * W.SEGMENT_WORDS, np.int32)
    words[W.H_VERSION] = W.VERSION
    words[W.H_BATCH] = batch
    words[W.H_NUM_ITEMS] = num_items
    words[W.H_HEADROOM] = headroom
    words[W.H_ORDER] = order
    words[W.H_GROWTHS] = growths
    words[W.H_SEGMENTS] = segments

    item, rest, segment = 0, num_items * W.PRE, segments
    num_partials, num_counters, longest = 0, 0, 0
    for t in np.argsort(-costs / parts, kind="mergesort"):  # heaviest items first
        queries = edge[t + 1] - edge[t]
        unmasked, masked = blocks[t, B_UNMASKED], blocks[t, B_MASKED]
        growth = -(-queries * headroom // W.BLOCK)
        total = unmasked + masked
        sides = sides_of(blocks[t], queries * group > W.HALF_ROWS)
        sequence = masked_sequence(sides)
        taken_unmasked, taken = 0, 0
        for part in range(parts[t]):
            w = W.HEADER_WORDS + item * item_words
            end = (part + 1) * total // parts[t]
            end_unmasked = end * unmasked // total
            last = part == parts[t] - 1
            count = end - taken
            words[w + W.I_BLOCKS] = count
            words[w + W.I_ROWS] = queries * group
            words[w + W.I_GROWING] = queries if last else 0
            words[w + W.I_REST] = rest
            words[w + W.I_FLAGS] = flags
            words[w + W.I_PART] = part
            words[w + W.I_PARTS] = parts[t]
            if parts[t] > 1:
                words[w + W.I_PARTIAL] = num_partials
                words[w + W.I_COUNTER] = num_counters
            for i in range(queries):
                words[w + W.I_QUERIES + i] = query[edge[t] + i]
            taken_masked = taken - taken_unmasked
            order_blocks(
                words, order, flags, item, rest, unmasked, sides, sequence,
                taken_unmasked, end_unmasked, taken_masked, end - end_unmasked,
            )  # fmt: skip
            if last:
                for i in range(growth):
                    words[order + total + i] = block_at(item, rest, count + i)
            flags += -(-count // W.FLAGS_PER_WORD)
            rest += max(0, count + (growth if last else 0) - W.PRE)
            taken, taken_unmasked = end, end_unmasked
            item += 1
        if parts[t] > 1:
            num_partials += parts[t]
            num_counters += 1

        # one list of unmasked blocks, one of masked columns in three categories, one of growth
        column = np.zeros(4, np.int64)
        column[1] = blocks[t, B_BOTH]
        column[2] = blocks[t, B_BOTH] + blocks[t, B_SIDE0]
        whole_columns = 0
        for r in range(offset[t], offset[t + 1]):
            source, start, length = run[r, R_REQUEST], run[r, R_START], run[r, R_LEN]
            first, last_query = run[r, R_FIRST], run[r, R_END]
            key = _make_key(first, last_query, group)
            whole = 0
            if first == 0 and last_query == queries:
                whole = length // W.BLOCK * W.BLOCK
            if whole:
                _segment(words, segment, order, whole_columns, source, start, whole, key)
                segment += W.SEGMENT_WORDS
                whole_columns += whole
                longest = max(longest, whole)
            if length > whole:
                side = side_of(first, last_query, queries, group)
                _segment(
                    words, segment, order + unmasked, column[side], source, start + whole,
                    length - whole, key,
                )  # fmt: skip
                segment += W.SEGMENT_WORDS
                column[side] += length - whole
                longest = max(longest, length - whole)
        used = blocks[t, B_BOTH] + blocks[t, B_SIDE0] + blocks[t, B_SIDE1]
        if used < masked * W.BLOCK:
            _segment(words, segment, order + unmasked, used, W.NONE, 0, masked * W.BLOCK - used, 0)
            segment += W.SEGMENT_WORDS
        if growth:
            _segment(words, segment, order + total, 0, W.NONE, 0, growth * W.BLOCK, 0)
            segment += W.SEGMENT_WORDS
            longest = max(longest, growth * W.BLOCK)
        for i in range(queries):
            row = request[edge[t] + i]
            g = growths + row * W.GROWTH_WORDS
            words[g + W.G_ORDER] = order + total
            words[g + W.G_INDEX] = i
            words[g + W.G_GROWING] = queries
            words[g + W.G_KEY] = _make_key(i, i + 1, group)
            words[g + W.G_LEN] = seq_lens[row]
        order += total + growth
    words[W.H_NUM_SEGMENTS] = (segment - segments) // W.SEGMENT_WORDS
    # a CTA asks for the slots of a block PRE blocks ahead, also behind the last item's end
    return words[:segment].copy(), rest + W.PRE, num_partials, num_counters, longest


@njit
def _segment(words, w, order, column, request, start, length, key):
    words[w + W.S_ORDER] = order
    words[w + W.S_COLUMN] = column
    words[w + W.S_REQUEST] = request
    words[w + W.S_START] = start
    words[w + W.S_LEN] = length
    words[w + W.S_KEY] = key
