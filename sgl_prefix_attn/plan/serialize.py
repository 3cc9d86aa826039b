"""Tiles of requests and their parts -> the plan's int32 words (layout in kernels/words.py)."""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.block_order import (
    block_at,
    masked_sequence,
    order_blocks,
    sides_of,
)
from sgl_prefix_attn.plan.plan import Plan, places_of_tiles, plan_of
from sgl_prefix_attn.plan.shared_words import make_key, write_header, write_segment
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
    parts_of_queries,
    side_of,
)
from sgl_prefix_attn.records import Forest


def serialize(forest: Forest, cut: Cut, group_size: int, headroom: int, tile_rows: int) -> Plan:
    """Lay out items, blocks and growth columns of a step that is cut so; a tile has at most as many
    parts as blocks.

    Unmasked and masked blocks of a part take turns, each spread evenly over it: products and the
    loads of private KV then overlap within an item. Parts share a tile's growth: were it all in
    one, the others would wait for that one, longer with every step.
    """
    tiles = cut.tiles
    found = _serialize(
        cut.leaves.request, cut.leaves.query, tiles.edge, tiles.offset, tiles.run, tiles.blocks,
        cut.parts, cut.costs, cut.split_off, forest.seq_lens, W.item_words(group_size, tile_rows),
        group_size, headroom, tile_rows,
    )  # fmt: skip
    return plan_of(found, forest, cut, group_size, headroom, tile_rows)


@cached_njit
def _merged_by_query(query, edge, parts, parts_of, split_off):
    """bool [T]: the tiles of which a query is in other tiles, too."""
    by_query = np.zeros(edge.size - 1, np.bool_)
    if split_off:
        for t in range(by_query.size):
            for place in range(edge[t], edge[t + 1]):
                by_query[t] |= parts_of[query[place]] > parts[t]
    return by_query


@cached_njit
def _part_ends(blocks, parts):
    """int [parts]: where each part of a tile's planned blocks ends."""
    return np.arange(1, parts + 1) * blocks // parts


@cached_njit
def _growths(queries, ends, headroom):
    """Return of a tile's parts the queries [edge[j], edge[j + 1]) that grow in part j and the
    blocks that they need. As many parts grow as there are blocks to grow into, at most one a query:
    those that have the fewest planned blocks."""
    growing = min(ends.size, queries, max(1, -(-queries * headroom // W.BLOCK)))
    planned = ends.copy()
    planned[1:] -= ends[:-1]
    grows = np.zeros(ends.size, np.int64)
    grows[np.argsort(planned, kind="mergesort")[:growing]] = 1
    edge = np.zeros(ends.size + 1, np.int64)
    edge[1:] = np.cumsum(grows) * queries // max(growing, 1)
    return edge, -(-(edge[1:] - edge[:-1]) * headroom // W.BLOCK)


@cached_njit
def _serialize(
    request, query, edge, offset, run, blocks, parts, costs, split_off, seq_lens, item_words, group,
    headroom, tile_rows,
):  # fmt: skip
    num_tiles, batch = edge.size - 1, seq_lens.size
    parts_of = parts_of_queries(query, edge, parts)
    by_query = _merged_by_query(query, edge, parts, parts_of, split_off)
    num_places, partial_tiles = 0, 0
    for t in range(num_tiles):
        if by_query[t]:
            num_places += (edge[t + 1] - edge[t]) * parts[t]
        elif parts[t] > 1:
            partial_tiles += parts[t]
    num_items, flag_words, order_words, num_segments = 0, 0, 0, 0
    for t in range(num_tiles):
        count = blocks[t, B_UNMASKED] + blocks[t, B_MASKED]
        num_items += parts[t]
        flag_words += count // W.FLAGS_PER_WORD + 2 * parts[t]
        _, growth = _growths(edge[t + 1] - edge[t], _part_ends(count, parts[t]), headroom)
        order_words += count + growth.sum()
        num_segments += 2 * (offset[t + 1] - offset[t]) + 2
    flags = W.HEADER_WORDS + num_items * item_words
    order = flags + flag_words
    growths = order + order_words
    merges = growths + batch * W.GROWTH_WORDS
    segments = merges + (parts_of.size * W.MERGE_WORDS + num_places if num_places else 0)
    words = np.zeros(segments + num_segments * W.SEGMENT_WORDS, np.int32)
    write_header(words, batch, num_items, headroom, tile_rows, order, growths, segments)
    first_place = np.zeros(num_tiles, np.int64)
    if num_places:
        words[W.H_MERGES] = merges
        first = places_of_tiles(partial_tiles, tile_rows, group)
        _merge_table(words, merges, first, first_place, query, edge, parts, parts_of, by_query)

    item, rest, segment = 0, num_items * W.PRE, segments
    num_partials, num_counters, longest = 0, 0, 0
    for t in np.argsort(-costs / parts, kind="mergesort"):  # heaviest items first
        queries = edge[t + 1] - edge[t]
        unmasked, masked = blocks[t, B_UNMASKED], blocks[t, B_MASKED]
        growing = queries if t >= split_off else 0
        total = unmasked + masked
        ends = _part_ends(total, parts[t])
        growing_edge, growth = _growths(growing, ends, headroom)
        grown = 0
        sides = sides_of(blocks[t], queries * group > W.HALF_ROWS)
        sequence = masked_sequence(sides)
        taken_unmasked, taken = 0, 0
        for part in range(parts[t]):
            w = W.HEADER_WORDS + item * item_words
            end = ends[part]
            end_unmasked = end * unmasked // total
            count = end - taken
            words[w + W.I_BLOCKS] = count
            words[w + W.I_ROWS] = queries * group
            words[w + W.I_GROWING] = growing_edge[part + 1] - growing_edge[part]
            words[w + W.I_REST] = rest
            words[w + W.I_FLAGS] = flags
            words[w + W.I_PART] = part
            words[w + W.I_PARTS] = parts[t]
            if by_query[t]:
                words[w + W.I_PARTS] = W.BY_QUERY
                words[w + W.I_PARTIAL] = first_place[t] + part * queries
            elif parts[t] > 1:
                words[w + W.I_PARTIAL] = num_partials
                words[w + W.I_COUNTER] = num_counters
            for i in range(queries):
                words[w + W.I_QUERIES + i] = query[edge[t] + i]
            taken_masked = taken - taken_unmasked
            order_blocks(
                words, order, flags, item, rest, unmasked, sides, sequence,
                taken_unmasked, end_unmasked, taken_masked, end - end_unmasked,
            )  # fmt: skip
            for i in range(growing_edge[part], growing_edge[part + 1]):
                row = request[edge[t] + i]
                g = growths + row * W.GROWTH_WORDS
                words[g + W.G_ORDER] = order + total + grown
                words[g + W.G_INDEX] = i - growing_edge[part]
                words[g + W.G_GROWING] = words[w + W.I_GROWING]
                words[g + W.G_KEY] = make_key(i, i + 1, group, tile_rows)
                words[g + W.G_LEN] = seq_lens[row]
            for i in range(growth[part]):
                words[order + total + grown + i] = block_at(item, rest, count + i)
            grown += growth[part]
            flags += -(-count // W.FLAGS_PER_WORD)
            rest += max(0, count + growth[part] - W.PRE)
            taken, taken_unmasked = end, end_unmasked
            item += 1
        if parts[t] > 1 and not by_query[t]:
            num_partials += parts[t]
            num_counters += 1

        # one list of unmasked blocks, and one of masked columns in three categories
        column = np.zeros(3, np.int64)
        column[1] = blocks[t, B_BOTH]
        column[2] = blocks[t, B_BOTH] + blocks[t, B_SIDE0]
        whole_columns = 0
        for r in range(offset[t], offset[t + 1]):
            source, start, length = run[r, R_REQUEST], run[r, R_START], run[r, R_LEN]
            first, last_query = run[r, R_FIRST], run[r, R_END]
            key = make_key(first, last_query, group, tile_rows)
            whole = 0
            if first == 0 and last_query == queries:
                whole = length // W.BLOCK * W.BLOCK
            if whole:
                write_segment(words, segment, order, whole_columns, source, start, whole, key)
                segment += W.SEGMENT_WORDS
                whole_columns += whole
                longest = max(longest, whole)
            if length > whole:
                side = side_of(first, last_query, queries, group)
                write_segment(
                    words, segment, order + unmasked, column[side], source, start + whole,
                    length - whole, key,
                )  # fmt: skip
                segment += W.SEGMENT_WORDS
                column[side] += length - whole
                longest = max(longest, length - whole)
        used = blocks[t, B_BOTH] + blocks[t, B_SIDE0] + blocks[t, B_SIDE1]
        if used < masked * W.BLOCK:
            write_segment(
                words, segment, order + unmasked, used, W.NONE, 0, masked * W.BLOCK - used, 0
            )
            segment += W.SEGMENT_WORDS
        if grown:
            write_segment(words, segment, order + total, 0, W.NONE, 0, grown * W.BLOCK, 0)
            segment += W.SEGMENT_WORDS
            longest = max(longest, grown * W.BLOCK)
        order += total + grown
    words[W.H_NUM_SEGMENTS] = (segment - segments) // W.SEGMENT_WORDS
    return words[:segment].copy(), rest + W.LOOKAHEAD, num_partials, num_places, longest


@cached_njit
def _merge_table(words, merges, first, first_place, query, edge, parts, parts_of, by_query):
    """Write MERGE and fill first_place int [T] of the tiles that are merged by query: places from
    `first` on, in the order of tiles, of their parts and of a part's queries."""
    for t in range(by_query.size):
        if by_query[t]:
            for place in range(edge[t], edge[t + 1]):
                m = merges + query[place] * W.MERGE_WORDS
                words[m + W.M_COUNT] = parts_of[query[place]]
    free = merges + parts_of.size * W.MERGE_WORDS
    for row in range(parts_of.size):
        m = merges + row * W.MERGE_WORDS
        words[m + W.M_PLACES] = free
        free += words[m + W.M_COUNT]
    filled = np.zeros(parts_of.size, np.int32)
    for t in range(by_query.size):
        if by_query[t]:
            first_place[t] = first
            for _ in range(parts[t]):
                for place in range(edge[t], edge[t + 1]):
                    row = query[place]
                    words[words[merges + row * W.MERGE_WORDS + W.M_PLACES] + filled[row]] = first
                    filled[row] += 1
                    first += 1
