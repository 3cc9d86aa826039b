"""Forward over private tails: several requests in one tile, each with its own slots.

A tail has GROUP query rows, too few for a tile, and is often short. So one work item holds up to
REQUESTS of them side by side: rows stand for (request, head of the group), columns for (request,
token), and scores off the diagonal blocks are masked (PackInfer §3.1: one tile over the union of
valid query-key regions). Lengths are read on the device, so tails grow without a new plan.
"""

import triton
import triton.language as tl

from .common import (
    E_DST,
    E_PARTIAL,
    E_ROW,
    E_START,
    ENTRY_WORDS,
    H_ENTRIES,
    H_QUEUES,
    I_ENTRY,
    I_NUM_QUERIES,
    I_NUM_SPLITS,
    I_SPLIT,
    ITEM_WORDS,
    LOG2_E,
    attend,
    soft_cap,
    split_range,
    store,
)


@triton.jit
def tails_kernel(
    q_ptr,  # [>= B, Hq, D]
    k_ptr,  # [slots, Hkv, D]
    v_ptr,  # [slots, Hkv, D]
    out_ptr,  # [>= B, Hq, D]
    out_lse_ptr,  # float32 [>= B, Hq], base 2, written where HAS_LSE
    partial_out_ptr,  # [partials, Hq, D]
    partial_state_ptr,  # float32 [partials, Hq, 2]: LSE in base 2, scale of the row
    plan_ptr,  # int32 [words]
    kv_indices_ptr,  # int32 [entries]
    seq_lens_ptr,  # int [>= B]
    ticket_ptr,  # int32: tickets handed out beyond the grid's first ones
    stride_q,  # elements between tokens of q
    stride_k,  # elements between slots
    stride_v,
    stride_out,
    sm_scale,
    logits_soft_cap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REQUESTS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_N // REQUESTS  # columns of one request
    p_items = plan_ptr + tl.load(plan_ptr + H_QUEUES + 2 * TILE)
    num_tickets = tl.load(plan_ptr + H_QUEUES + 2 * TILE + 1) * NUM_KV_HEADS
    p_entries = plan_ptr + tl.load(plan_ptr + H_ENTRIES)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    i_query = offs_m // GROUP
    i_owner = offs_n // TOKENS  # request that a column belongs to
    diagonal = i_query[:, None] == i_owner[None, :]

    ticket = tl.program_id(0)
    while ticket < num_tickets:
        p_item = p_items + (ticket // NUM_KV_HEADS) * ITEM_WORDS
        i_head = ticket % NUM_KV_HEADS
        num_queries = tl.load(p_item + I_NUM_QUERIES)
        i_split = tl.load(p_item + I_SPLIT)
        num_splits = tl.load(p_item + I_NUM_SPLITS)
        p_entry = p_entries + tl.load(p_item + I_ENTRY) * ENTRY_WORDS

        # columns: each request's own segment and its own bounds
        owned = i_owner < num_queries
        p_owner = p_entry + i_owner * ENTRY_WORDS
        b_owner = tl.load(p_owner + E_ROW, mask=owned, other=0)
        b_before = tl.load(p_owner + E_START, mask=owned, other=0)
        p_slots = kv_indices_ptr + tl.load(p_owner + E_DST, mask=owned, other=0)
        # through int64: Triton 3.6 cannot lay out what follows an int32 load from 4 warps on
        b_seq_len = tl.load(seq_lens_ptr + b_owner, mask=owned, other=0).to(tl.int64)
        b_kv_len = (b_seq_len - b_before).to(tl.int32)
        b_start, b_end = split_range(b_kv_len, i_split, num_splits)
        longest = tl.max(b_end - b_start, 0)

        mask_m = i_query < num_queries
        b_row = tl.load(p_entry + i_query * ENTRY_WORDS + E_ROW, mask=mask_m, other=0)
        b_partial = tl.load(p_entry + i_query * ENTRY_WORDS + E_PARTIAL, mask=mask_m, other=0)
        b_partial = tl.where(b_partial < 0, b_partial, b_partial + i_split)
        i_qo_head = i_head * GROUP + offs_m % GROUP

        # [BLOCK_M, BLOCK_D]
        p_q = q_ptr + b_row.to(tl.int64) * stride_q + i_qo_head * HEAD_DIM
        mask_md = mask_m[:, None] & mask_d[None, :]
        b_q = tl.load(p_q[:, None] + offs_d[None, :], mask=mask_md, other=0.0)
        p_k = k_ptr + i_head * HEAD_DIM + offs_d
        p_v = v_ptr + i_head * HEAD_DIM + offs_d

        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for n in range(0, longest, TOKENS):
            b_token = b_start + n + offs_n % TOKENS
            mask_n = b_token < b_end
            b_index = tl.load(p_slots + b_token, mask=mask_n, other=0).to(tl.int64)
            # [BLOCK_D, BLOCK_N]
            mask_dn = mask_d[:, None] & mask_n[None, :]
            b_k = tl.load(p_k[:, None] + b_index[None, :] * stride_k, mask=mask_dn, other=0.0)
            b_s = tl.dot(b_q, b_k, input_precision="ieee") * (sm_scale * LOG2_E)
            if HAS_SOFT_CAP:
                b_s = soft_cap(b_s, logits_soft_cap)
            # rows without a request attend to everything: their zeros are never stored
            valid = (diagonal & mask_n[None, :]) | ~mask_m[:, None]
            b_s = tl.where(valid, b_s, float("-inf"))
            # [BLOCK_N, BLOCK_D]
            mask_nd = mask_n[:, None] & mask_d[None, :]
            b_v = tl.load(p_v[None, :] + b_index[:, None] * stride_v, mask=mask_nd, other=0.0)
            b_max, b_sum, b_acc = attend(b_s, b_v, b_max, b_sum, b_acc)

        # taken at the end, so that the queue balances; other CTAs hide its latency
        next_ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed") + tl.num_programs(0)
        store(
            b_acc, b_max, b_sum, b_row, b_partial, i_qo_head, mask_m, offs_d, mask_d,
            out_ptr, out_lse_ptr, partial_out_ptr, partial_state_ptr, stride_out,
            NUM_KV_HEADS * GROUP, HEAD_DIM, HAS_LSE,
        )  # fmt: skip
        ticket = next_ticket
