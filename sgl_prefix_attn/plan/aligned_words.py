"""Aligned parts (aligned.py) -> the plan's int32 words (layout in kernels/words.py).

A part reads its unmasked blocks, then its masked ones, then those that its requests grow into, in
the order in which they begin to: so each row's blocks come in the order of their positions, and
those of a step are the first ones of the list.
"""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.aligned import AlignedCut, goes_on, whole_below, whole_columns
from sgl_prefix_attn.plan.block_order import block_at, masked_sequence, sides_of
from sgl_prefix_attn.plan.plan import Plan, plan_of
from sgl_prefix_attn.plan.shared_words import make_key, write_header, write_segment
from sgl_prefix_attn.plan.tiles import (
    B_BOTH,
    B_MASKED,
    B_SIDE0,
    B_UNMASKED,
    R_END,
    R_FIRST,
    R_LEN,
    R_REQUEST,
    R_START,
    side_of,
)
from sgl_prefix_attn.records import Forest


def serialize_aligned(
    forest: Forest, cut: AlignedCut, group_size: int, tile_rows: int, part_tokens: int
) -> Plan:
    """Lay out the parts of a step that is cut so, and blocks for its headroom."""
    tiles = cut.tiles
    found = _serialize(
        cut.leaves.request, cut.leaves.query, tiles.edge, tiles.offset, tiles.run, tiles.blocks,
        cut.part, cut.costs, forest.seq_lens, W.item_words(group_size, tile_rows), group_size,
        cut.headroom, tile_rows, part_tokens,
    )  # fmt: skip
    return plan_of(found, forest, cut, group_size, cut.headroom, tile_rows)


@cached_njit
def _new_blocks(seq_lens, headroom):
    """Return int [B]: the first block of positions that each request would begin, and how many it
    begins within `headroom` steps."""
    first = -(-seq_lens // W.BLOCK)
    return first, -(-(seq_lens + headroom) // W.BLOCK) - first


@cached_njit
def _in_order_of_steps(request, low, high, part, new, count, seq_lens, part_tokens):
    """Return int [n, 3]: the places, blocks of positions and steps in which the requests of a part
    begin blocks, by steps."""
    most = 0
    for place in range(low, high):
        most += count[request[place]]
    found = np.empty((most, 3), np.int64)
    size = 0
    for i in range(high - low):
        row = request[low + i]
        is_whole = seq_lens[row] < whole_below(part_tokens)
        for block in range(new[row], new[row] + count[row]):
            if part == (0 if is_whole else block * W.BLOCK // part_tokens):
                found[size, 0] = i
                found[size, 1] = block
                found[size, 2] = block * W.BLOCK - seq_lens[row]
                size += 1
    if size < 2:
        return found[:size]
    return found[np.argsort(found[:size, 2], kind="mergesort")]


@cached_njit
def _serialize(
    request, query, edge, offset, run, blocks, part, costs, seq_lens, item_words, group, headroom,
    tile_rows, part_tokens,
):  # fmt: skip
    num_items, batch = edge.size - 1, seq_lens.size
    new, begins = _new_blocks(seq_lens, headroom)
    begun = np.zeros(batch, np.int64)  # 1 where the request's newest block has columns left
    if headroom:
        begun[seq_lens % W.BLOCK != 0] = 1
    listed = begins + begun  # blocks that a request grows into
    planned = blocks[:, B_UNMASKED] + blocks[:, B_MASKED]
    # at most: each block that is begun is in one part of one tile
    order_words = planned.sum() + begins.sum() + 2 * listed.sum()
    flag_words = (planned.sum() + begins.sum()) // W.FLAGS_PER_WORD + 2 * num_items
    flags = W.HEADER_WORDS + num_items * item_words
    order = flags + flag_words
    lists = order + planned.sum() + begins.sum()
    growths = order + order_words
    segments = growths + batch * W.GROWTH_WORDS
    num_segments = 3 * len(run) + num_items
    words = np.zeros(segments + num_segments * W.SEGMENT_WORDS, np.int32)
    write_header(words, batch, num_items, headroom, tile_rows, order, growths, segments)
    words[W.H_PART_TOKENS] = part_tokens
    for row in range(batch):
        g = growths + row * W.GROWTH_WORDS
        words[g + W.G_ORDER] = lists
        words[g + W.G_ITEMS] = lists + listed[row]
        words[g + W.G_INDEX] = seq_lens[row] % W.BLOCK
        words[g + W.G_GROWING] = 1
        words[g + W.G_LEN] = seq_lens[row]
        lists += 2 * listed[row]

    parts, partial, counter = np.ones_like(part), np.zeros_like(part), np.zeros_like(part)
    num_partials, num_counters, longest = 0, 0, W.BLOCK
    first = num_items
    for p in range(num_items - 1, -1, -1):
        if part[p] == 0:
            parts[p:first] = first - p
            if first - p > 1:
                partial[p:first], counter[p:first] = num_partials, num_counters
                num_partials += first - p
                num_counters += 1
            first = p

    item, rest, segment = 0, num_items * W.PRE, segments
    for p in np.argsort(-costs, kind="mergesort"):  # heaviest items first
        queries = edge[p + 1] - edge[p]
        unmasked = blocks[p, B_UNMASKED]
        sides = sides_of(blocks[p], queries * group > W.HALF_ROWS)
        sequence = masked_sequence(sides)
        growth = _in_order_of_steps(
            request, edge[p], edge[p + 1], part[p], new, begins, seq_lens, part_tokens
        )
        total = planned[p] + len(growth)
        w = W.HEADER_WORDS + item * item_words
        # one at least: a part may be there for what its requests grow into alone
        words[w + W.I_BLOCKS] = max(planned[p], 1)
        words[w + W.I_ROWS] = queries * group
        words[w + W.I_REST] = rest
        words[w + W.I_FLAGS] = flags
        words[w + W.I_PART] = part[p]
        words[w + W.I_PARTS] = parts[p]
        words[w + W.I_PARTIAL] = partial[p]
        words[w + W.I_COUNTER] = counter[p]
        words[w + W.I_QUERIES : w + W.I_QUERIES + queries] = query[edge[p] : edge[p + 1]]
        passed_on = W.FOR_BOTH  # as in block_order.py
        for b in range(total):
            block, flag = b, W.FOR_BOTH
            if b >= planned[p]:
                i = growth[b - planned[p], 0]
                side = side_of(i, i + 1, queries, group)
                flag = W.MASKED | (W.FOR_BOTH if side == 0 else W.FOR_WARPGROUP << side - 1)
            elif b >= unmasked:
                block = unmasked + sequence[b - unmasked]
                flag = W.MASKED | sides[sequence[b - unmasked]]
            flag |= passed_on
            passed_on = W.FOR_BOTH & ~flag
            words[order + block] = block_at(item, rest, b)
            words[flags + b // W.FLAGS_PER_WORD] |= flag << (b % W.FLAGS_PER_WORD * W.FLAG_BITS)

        # one list of unmasked blocks, and one of masked ones in three categories
        column = np.zeros(3, np.int64)
        column[1] = blocks[p, B_BOTH]
        column[2] = blocks[p, B_BOTH] + blocks[p, B_SIDE0]
        whole_column, free = 0, 0  # free: the next column of the block that was begun last
        for r in range(offset[p], offset[p + 1]):
            source, start, length = run[r, R_REQUEST], run[r, R_START], run[r, R_LEN]
            key = make_key(run[r, R_FIRST], run[r, R_END], group, tile_rows)
            whole = 0
            if not goes_on(run, r):
                segment = _leave_empty(words, segment, order + unmasked, free)
                whole = whole_columns(run, r, queries)
                side = side_of(run[r, R_FIRST], run[r, R_END], queries, group)
                free = column[side]
                column[side] += -(-(length - whole) // W.BLOCK) * W.BLOCK
            if whole:
                write_segment(words, segment, order, whole_column, source, start, whole, key)
                segment += W.SEGMENT_WORDS
                whole_column += whole
                longest = max(longest, whole)
            if length > whole:
                write_segment(
                    words, segment, order + unmasked, free, source, start + whole, length - whole,
                    key,
                )  # fmt: skip
                segment += W.SEGMENT_WORDS
                free += length - whole
                longest = max(longest, length - whole)
            if start + length == seq_lens[source] and begun[source]:  # its tail
                g = growths + source * W.GROWTH_WORDS
                words[words[g + W.G_ORDER]] = words[order + unmasked + (free - 1) // W.BLOCK]
                words[words[g + W.G_ITEMS]] = w
        segment = _leave_empty(words, segment, order + unmasked, free)
        if len(growth):
            columns = len(growth) * W.BLOCK
            write_segment(words, segment, order + planned[p], 0, W.NONE, 0, columns, 0)
            segment += W.SEGMENT_WORDS
            longest = max(longest, columns)
        for b in range(len(growth)):
            row = request[edge[p] + growth[b, 0]]
            g = growths + row * W.GROWTH_WORDS
            at = begun[row] + growth[b, 1] - new[row]
            words[words[g + W.G_ORDER] + at] = words[order + planned[p] + b]
            words[words[g + W.G_ITEMS] + at] = w
        for i in range(queries):
            g = growths + request[edge[p] + i] * W.GROWTH_WORDS
            words[g + W.G_KEY] = make_key(i, i + 1, group, tile_rows)
        flags += -(-total // W.FLAGS_PER_WORD)
        rest += max(0, total - W.PRE)
        order += total
        item += 1
    words[W.H_NUM_SEGMENTS] = (segment - segments) // W.SEGMENT_WORDS
    return words[:segment].copy(), rest + W.LOOKAHEAD, num_partials, 0, longest


@cached_njit
def _leave_empty(words, segment, order, free):
    """Fill the block that column `free` is in, if it is begun; return where the next segment is."""
    left = -free % W.BLOCK
    if left:
        write_segment(words, segment, order, free, W.NONE, 0, left, 0)
        segment += W.SEGMENT_WORDS
    return segment
