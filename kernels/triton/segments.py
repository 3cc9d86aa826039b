"""Index segments: filled once when a plan is loaded, one entry longer per request at every step."""

import triton
import triton.language as tl

from .. import layout as L

SEGMENTS = tl.constexpr(L.H_SEGMENTS)
BATCH, TAILS = tl.constexpr(L.H_BATCH), tl.constexpr(L.H_TAILS)
SEGMENT_WORDS, TAIL_WORDS = tl.constexpr(L.SEGMENT_WORDS), tl.constexpr(L.TAIL_WORDS)
S_DST, S_ROW = tl.constexpr(L.S_DST), tl.constexpr(L.S_ROW)
S_START, S_LEN = tl.constexpr(L.S_START), tl.constexpr(L.S_LEN)
T_DST, T_START = tl.constexpr(L.T_DST), tl.constexpr(L.T_START)


@triton.jit
def fill_segments_kernel(
    plan_ptr,  # int32 [words]
    req_to_token_ptr,  # int32 [R, C]
    req_pool_indices_ptr,  # int [B]
    kv_indices_ptr,  # int32 [entries], written
    stride_row,  # elements between rows of req_to_token
    BLOCK: tl.constexpr,
):
    """Grid (segments, blocks): program (s, b) copies block b, b + blocks, ... of segment s."""
    i_segment = tl.program_id(0)
    p_segment = plan_ptr + tl.load(plan_ptr + SEGMENTS) + i_segment * SEGMENT_WORDS
    i_dst = tl.load(p_segment + S_DST)
    start = tl.load(p_segment + S_START)
    length = tl.load(p_segment + S_LEN)
    i_row = tl.load(req_pool_indices_ptr + tl.load(p_segment + S_ROW)).to(tl.int64)
    p_row = req_to_token_ptr + i_row * stride_row + start
    for i in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        offs = i + tl.arange(0, BLOCK)
        b_slots = tl.load(p_row + offs, mask=offs < length)
        tl.store(kv_indices_ptr + i_dst + offs, b_slots, mask=offs < length)


@triton.jit
def append_kernel(
    plan_ptr,  # int32 [words]
    seq_lens_ptr,  # int [>= B]
    out_cache_loc_ptr,  # int [>= B]
    kv_indices_ptr,  # int32 [entries], written
    BLOCK: tl.constexpr,
):
    """Append each request's newest slot to its tail, in one program. Idempotent."""
    batch = tl.load(plan_ptr + BATCH)
    p_tails = plan_ptr + tl.load(plan_ptr + TAILS)
    for i in range(0, batch, BLOCK):
        offs = i + tl.arange(0, BLOCK)
        mask = offs < batch
        b_dst = tl.load(p_tails + offs * TAIL_WORDS + T_DST, mask=mask)
        b_start = tl.load(p_tails + offs * TAIL_WORDS + T_START, mask=mask)
        b_len = tl.load(seq_lens_ptr + offs, mask=mask).to(tl.int32)
        b_partial = tl.load(out_cache_loc_ptr + offs, mask=mask).to(tl.int32)
        tl.store(kv_indices_ptr + b_dst + b_len - 1 - b_start, b_partial, mask=mask)
