"""How large a server's workspace is. Where a plan is too large for it the planner takes wider
tiles, before a step goes to stock kernels; aligned plans of any batch fit in the widest."""

from __future__ import annotations

from typing import NamedTuple

from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.aligned import whole_below
from sgl_prefix_attn.plan.capacity import Capacity
from sgl_prefix_attn.records import HeadConfig

# How often tiles of one plan may read each KV slot of a server, and how many reads (8 bytes each)
# there is room for in any case: few slots may be shared by many tiles.
_READS, _LEAST_READS = 8, 1 << 23
# Partial results of a request, on average, where nodes are split off.
_PLACES = 8


class Served(NamedTuple):
    """The most that a batch has: queries, of so many requests, each of up to `longest` tokens, over
    `tokens` KV slots; headroom: steps that its plan may grow by."""

    queries: int
    requests: int
    tokens: int
    longest: int
    headroom: int


def usual_capacity(
    heads: HeadConfig, tile_rows: int, num_sms: int, splits_nodes: bool, most: Served
) -> Capacity:
    """Return enough for the widest tiles to read every slot as often as there are tiles that may
    read it, up to _READS times or _LEAST_READS in all.

    Besides, headroom, unfilled blocks and on average six runs of KV for every request. Where nodes
    are split off, an item more and on average _PLACES partial results for each.
    """
    parts = _parts_of_all_ctas(heads, num_sms)
    items = most.queries + parts
    partials = _cdiv(parts * tile_rows, heads.group_size)
    places = 0
    if splits_nodes:
        items += most.queries
        places = _PLACES * most.queries
    tiles = _cdiv(most.queries, W.queries_per_tile(heads.group_size, tile_rows))
    reads = min(tiles * most.tokens, max(_READS * most.tokens, _LEAST_READS))
    # besides whole blocks an item has one that is masked, one of growth and its first blocks
    blocks = _cdiv(reads + most.headroom * most.queries, W.BLOCK)
    blocks += (2 + W.PRE) * items + W.LOOKAHEAD
    segments = 2 * (6 * most.queries) + 2 * items
    return Capacity(
        words=W.HEADER_WORDS
        + items * (W.item_words(heads.group_size, tile_rows) + 2)
        + 2 * blocks
        + most.queries * (W.GROWTH_WORDS + W.MERGE_WORDS)
        + places
        + segments * W.SEGMENT_WORDS,
        index_slots=blocks * W.BLOCK,
        partials=partials + places,
    )


def aligned_capacity(
    heads: HeadConfig, tile_rows: int, num_sms: int, part_tokens: int, most: Served
) -> Capacity:
    """Return enough for any batch in the widest tiles: no step may go to stock kernels, and how
    many parts a tile has follows from its longest request. Besides, partial results for narrower
    tiles, which are the only way to work for all CTAs."""
    wide = W.queries_per_tile(heads.group_size, tile_rows)
    tiles, longest = _cdiv(most.queries, wide), min(most.longest, most.tokens)
    parts = tiles * _cdiv(longest + most.headroom, part_tokens)
    items = most.queries + parts
    # a request's queries stand together, so that all but two of its tiles are its own
    pairs = tiles + most.requests
    # what rows of one part and rows of several read each for themselves
    twice = max(0, min(longest, whole_below(part_tokens)) - part_tokens)
    reads = min(
        tiles * min(most.tokens, wide * longest) + 2 * pairs * twice, pairs * (longest + twice)
    )
    # every request has a block that is not full, and one more for each that it grows into
    own = most.queries * (2 + _cdiv(most.headroom, W.BLOCK))
    stretches = 2 * pairs if twice else 0
    blocks = _cdiv(reads, W.BLOCK) + own + (1 + W.PRE) * items + W.LOOKAHEAD + stretches
    runs = 6 * most.queries + _cdiv(reads, part_tokens) + stretches
    partial_tiles = parts + _parts_of_all_ctas(heads, num_sms)
    return Capacity(
        words=W.HEADER_WORDS
        + items * (W.item_words(heads.group_size, tile_rows) + 2)
        + 2 * (blocks + own)
        + most.queries * W.GROWTH_WORDS
        + (3 * runs + items) * W.SEGMENT_WORDS,
        index_slots=blocks * W.BLOCK,
        partials=_cdiv(partial_tiles * tile_rows, heads.group_size),
    )


def _parts_of_all_ctas(heads: HeadConfig, num_sms: int) -> int:
    """Count the parts of tiles that the fastest plans of few tiles have, about at most."""
    return 2 * (num_sms // heads.num_kv_heads + 1)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
