"""Slots and keys of a plan's blocks: filled once, one column a request more every step.

Written in Triton: nothing here needs a Hopper GPU, and both run outside of attention.
"""

import triton
import triton.language as tl

from sgl_prefix_attn.kernels import words as W

BLOCK = tl.constexpr(W.BLOCK)
H_BATCH, H_STEPS = tl.constexpr(W.H_BATCH), tl.constexpr(W.H_STEPS)
H_HEADROOM, H_GROWTHS = tl.constexpr(W.H_HEADROOM), tl.constexpr(W.H_GROWTHS)
H_SEGMENTS = tl.constexpr(W.H_SEGMENTS)
SEGMENT_WORDS, GROWTH_WORDS = tl.constexpr(W.SEGMENT_WORDS), tl.constexpr(W.GROWTH_WORDS)
S_ORDER, S_COLUMN = tl.constexpr(W.S_ORDER), tl.constexpr(W.S_COLUMN)
S_REQUEST, S_START = tl.constexpr(W.S_REQUEST), tl.constexpr(W.S_START)
S_LEN, S_KEY = tl.constexpr(W.S_LEN), tl.constexpr(W.S_KEY)
G_ORDER, G_INDEX = tl.constexpr(W.G_ORDER), tl.constexpr(W.G_INDEX)
G_GROWING, G_KEY = tl.constexpr(W.G_GROWING), tl.constexpr(W.G_KEY)
G_LEN, G_ITEMS = tl.constexpr(W.G_LEN), tl.constexpr(W.G_ITEMS)
I_BLOCKS, I_REST = tl.constexpr(W.I_BLOCKS), tl.constexpr(W.I_REST)
PRE, NONE = tl.constexpr(W.PRE), tl.constexpr(W.NONE)


@triton.jit
def _entries(words_ptr, i_order, columns, mask):
    """Entries of slots and keys of columns of the block list that starts at ORDER word i_order."""
    block = tl.load(words_ptr + i_order + columns // BLOCK, mask=mask, other=0)
    return block.to(tl.int64) * BLOCK + columns % BLOCK


@triton.jit
def fill_blocks_kernel(
    words_ptr,  # int32 [words]
    req_to_token_ptr,  # int32 [R, C]
    req_pool_indices_ptr,  # int [B]
    slots_ptr,  # int32 [blocks, BLOCK], written
    keys_ptr,  # int32 [blocks, BLOCK], written
    stride_row,  # elements between rows of req_to_token
    STEP: tl.constexpr,
):
    """Copy slots and write keys. Grid (segments, any): the programs of a segment take turns with
    STEP columns each."""
    w = tl.load(words_ptr + H_SEGMENTS) + tl.program_id(0) * SEGMENT_WORDS
    p_segment = words_ptr + w
    i_order = tl.load(p_segment + S_ORDER)
    column = tl.load(p_segment + S_COLUMN)
    request = tl.load(p_segment + S_REQUEST)
    start = tl.load(p_segment + S_START)
    length = tl.load(p_segment + S_LEN)
    key = tl.load(p_segment + S_KEY)
    i_row = tl.load(req_pool_indices_ptr + tl.maximum(request, 0)).to(tl.int64)
    p_row = req_to_token_ptr + i_row * stride_row + start
    for i in range(tl.program_id(1) * STEP, length, tl.num_programs(1) * STEP):
        offs = i + tl.arange(0, STEP)
        mask = offs < length
        b_slots = tl.load(p_row + offs, mask=mask & (request >= 0), other=NONE)
        b_entry = _entries(words_ptr, i_order, column + offs, mask)
        tl.store(slots_ptr + b_entry, b_slots.to(tl.int32), mask=mask)
        tl.store(keys_ptr + b_entry, tl.zeros([STEP], tl.int32) + key, mask=mask)


@triton.jit
def append_token_kernel(
    words_ptr,  # int32 [words], H_STEPS and, of aligned plans, I_BLOCKS written
    seq_lens_ptr,  # int [>= B]
    out_cache_loc_ptr,  # int [>= B]
    slots_ptr,  # int32 [blocks, BLOCK], written
    keys_ptr,  # int32 [blocks, BLOCK], written
    STEP: tl.constexpr,
):
    """Append in one program: each request's newest slot goes to its step's growth column.
    Idempotent."""
    batch = tl.load(words_ptr + H_BATCH)
    headroom = tl.load(words_ptr + H_HEADROOM)
    p_growths = words_ptr + tl.load(words_ptr + H_GROWTHS)
    for i in range(0, batch, STEP):
        offs = i + tl.arange(0, STEP)
        mask = offs < batch
        p_growth = p_growths + offs * GROWTH_WORDS
        b_len = tl.load(p_growth + G_LEN, mask=mask, other=0)
        b_step = tl.load(seq_lens_ptr + offs, mask=mask, other=0).to(tl.int32) - b_len
        p_steps = words_ptr + H_STEPS + tl.zeros([STEP], tl.int32)
        b_shown = tl.minimum(tl.maximum(b_step, 0), headroom)
        tl.store(p_steps, b_shown, mask=offs == 0)
        # behind the headroom are another tile's blocks; a server makes a new plan before
        mask &= (b_step > 0) & (b_step <= headroom)
        b_growing = tl.load(p_growth + G_GROWING, mask=mask, other=0)
        b_column = (b_step - 1) * b_growing + tl.load(p_growth + G_INDEX, mask=mask, other=0)
        b_order = tl.load(p_growth + G_ORDER, mask=mask, other=0)
        b_entry = _entries(words_ptr, b_order, b_column, mask)
        b_slot = tl.load(out_cache_loc_ptr + offs, mask=mask, other=0).to(tl.int32)
        tl.store(slots_ptr + b_entry, b_slot, mask=mask)
        tl.store(keys_ptr + b_entry, tl.load(p_growth + G_KEY, mask=mask, other=0), mask=mask)
        # an aligned plan's items have as many of their reserved blocks as these tokens need
        b_items = tl.load(p_growth + G_ITEMS, mask=mask, other=0)
        mask &= b_items > 0
        b_item = tl.load(words_ptr + b_items + b_column // BLOCK, mask=mask, other=0)
        b_rest = tl.load(words_ptr + b_item + I_REST, mask=mask, other=0)
        b_block = (b_entry // BLOCK).to(tl.int32)
        b_before = tl.where(b_block < b_rest, b_block % PRE, b_block - b_rest + PRE)
        tl.atomic_max(words_ptr + b_item + I_BLOCKS, b_before + 1, mask=mask, sem="relaxed")
