"""Merge a request's partial results by their LSE, in fixed order (PAT §7)."""

import triton
import triton.language as tl

from .. import layout as L

H_MERGES, H_NUM_MERGES = tl.constexpr(L.H_MERGES), tl.constexpr(L.H_NUM_MERGES)
MERGE_WORDS, MAX_TILES = tl.constexpr(L.MERGE_WORDS), tl.constexpr(L.MAX_TILES)
M_ROW, M_COUNT = tl.constexpr(L.M_ROW), tl.constexpr(L.M_COUNT)
M_PARTIAL = tl.constexpr(L.M_PARTIAL)


@triton.jit
def merge_kernel(
    partial_out_ptr,  # [partials, Hq, D]
    partial_state_ptr,  # float32 [partials, Hq, 2]: LSE in base 2, scale of the row
    out_ptr,  # [>= B, Hq, D]
    out_lse_ptr,  # float32 [>= B, Hq], base 2, written where HAS_LSE
    plan_ptr,  # int32 [words]
    tickets_ptr,  # int32 [MAX_TILES], set back to 0 for the next forward
    stride_out,
    NUM_QO_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Grid (any, heads / BLOCK_H): programs walk the list of requests that have several parts."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(tickets_ptr + tl.arange(0, MAX_TILES), tl.zeros([MAX_TILES], tl.int32))
    p_merges = plan_ptr + tl.load(plan_ptr + H_MERGES)
    num_merges = tl.load(plan_ptr + H_NUM_MERGES)
    offs_d = tl.arange(0, BLOCK_D)
    i_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = i_head < NUM_QO_HEADS
    mask = mask_h[:, None] & (offs_d < HEAD_DIM)[None, :]
    for i in range(tl.program_id(0), num_merges, tl.num_programs(0)):
        p_merge = p_merges + i * MERGE_WORDS
        i_row = tl.load(p_merge + M_ROW).to(tl.int64)
        i_first = tl.load(p_merge + M_PARTIAL).to(tl.int64)
        count = tl.load(p_merge + M_COUNT)
        b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
        for first in range(0, count, BLOCK_P):
            offs_p = first + tl.arange(0, BLOCK_P)
            i_state = (i_first + offs_p)[:, None] * NUM_QO_HEADS + i_head[None, :]
            mask_state = (offs_p < count)[:, None] & mask_h[None, :]
            b_lses = tl.load(partial_state_ptr + i_state * 2, mask=mask_state, other=float("-inf"))
            b_max = tl.maximum(b_max, tl.max(b_lses, 0))
        b_max = tl.where(mask_h, b_max, 0.0)
        b_sum = tl.zeros([BLOCK_H], tl.float32)
        b_acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        # loads do not depend on earlier parts: unrolled, several are in flight
        for part in tl.range(0, count, loop_unroll_factor=4):
            i_partial = (i_first + part) * NUM_QO_HEADS + i_head
            b_lse = tl.load(partial_state_ptr + i_partial * 2, mask=mask_h, other=0.0)
            b_scale = tl.load(partial_state_ptr + i_partial * 2 + 1, mask=mask_h, other=0.0)
            p_partial = partial_out_ptr + i_partial[:, None] * HEAD_DIM + offs_d[None, :]
            b_out = tl.load(p_partial, mask=mask, other=0.0).to(tl.float32)
            b_weight = tl.exp2(b_lse - b_max)
            b_acc += b_out * (b_weight * b_scale)[:, None]
            b_sum += b_weight
        p_out = out_ptr + i_row * stride_out + i_head[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(p_out, (b_acc / b_sum[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        if HAS_LSE:
            tl.store(
                out_lse_ptr + i_row * NUM_QO_HEADS + i_head, b_max + tl.log2(b_sum), mask=mask_h
            )
