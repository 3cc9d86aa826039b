"""The words that plans of both kinds have: serialize.py's and aligned_words.py's."""

from __future__ import annotations

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.kernels import words as W

make_key = cached_njit(W.make_key)


@cached_njit
def write_header(words, batch, num_items, headroom, tile_rows, order, growths, segments):
    words[W.H_BATCH] = batch
    words[W.H_NUM_ITEMS] = num_items
    words[W.H_HEADROOM] = headroom
    words[W.H_TILE_ROWS] = tile_rows
    words[W.H_ORDER] = order
    words[W.H_GROWTHS] = growths
    words[W.H_SEGMENTS] = segments


@cached_njit
def write_segment(words, w, order, column, request, start, length, key):
    words[w + W.S_ORDER] = order
    words[w + W.S_COLUMN] = column
    words[w + W.S_REQUEST] = request
    words[w + W.S_START] = start
    words[w + W.S_LEN] = length
    words[w + W.S_KEY] = key
