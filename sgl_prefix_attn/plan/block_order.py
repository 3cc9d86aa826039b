"""The order in which an item of a tile reads its blocks, and the flags that say for whom they
are (layout in kernels/words.py).
"""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.tiles import B_BOTH, B_MASKED, B_SIDE0, B_SIDE1


@cached_njit
def block_at(item, rest, b):
    """Return where block b of an item lies."""
    return item * W.PRE + b if b < W.PRE else rest + b - W.PRE


@cached_njit
def sides_of(blocks, wide):
    """Return int [masked]: which warpgroups each masked block is for, as its FLAGS have it."""
    masked = blocks[B_MASKED]
    sides = np.full(masked, W.FOR_BOTH, np.int32)
    if wide:
        end_both = blocks[B_BOTH]
        end_first = end_both + blocks[B_SIDE0]
        end = end_first + blocks[B_SIDE1]
        for b in range(masked):
            low, high = b * W.BLOCK, min((b + 1) * W.BLOCK, end)
            if low >= end_both:
                first = low < end_first
                second = high > end_first
                sides[b] = W.FOR_WARPGROUP * (1 * first + 2 * second)
    return sides


@cached_njit
def masked_sequence(sides):
    """Return masked blocks in the order in which they are read: those for both halves of the tile,
    then the one half's and the other's in turn."""
    sequence = np.empty(sides.size, np.int32)
    one = np.empty(sides.size, np.int32)
    other = np.empty(sides.size, np.int32)
    n, n_one, n_other = 0, 0, 0
    for b in range(sides.size):
        if sides[b] == W.FOR_BOTH:
            sequence[n] = b
            n += 1
        elif sides[b] == W.FOR_WARPGROUP:
            one[n_one] = b
            n_one += 1
        else:
            other[n_other] = b
            n_other += 1
    total = n_one + n_other
    for i in range(total):
        before, after = i * n_one // total, (i + 1) * n_one // total
        sequence[n + i] = one[before] if after > before else other[i - before]
    return sequence


@cached_njit
def order_blocks(
    words, order, flags, item, rest, unmasked, sides, sequence,
    first_unmasked, end_unmasked, first_masked, end_masked,
):  # fmt: skip
    """Write ORDER and FLAGS of one part: its unmasked and masked blocks in turn, evenly spread."""
    num_unmasked = end_unmasked - first_unmasked
    count = num_unmasked + end_masked - first_masked
    passed_on = W.FOR_BOTH  # by which warpgroups the block before; the first one is for both
    for b in range(count):
        before = (2 * b * num_unmasked + count) // (2 * count)
        after = (2 * (b + 1) * num_unmasked + count) // (2 * count)
        if after > before:
            block = first_unmasked + before
            flag = W.FOR_BOTH
        else:
            masked = sequence[first_masked + b - before]
            block = unmasked + masked
            flag = W.MASKED | sides[masked]
        # no warpgroup may pass on two blocks in turn; masked scores of a whole block do no harm
        flag |= passed_on
        passed_on = W.FOR_BOTH & ~flag
        words[order + block] = block_at(item, rest, b)
        words[flags + b // W.FLAGS_PER_WORD] |= flag << (b % W.FLAGS_PER_WORD * W.FLAG_BITS)
