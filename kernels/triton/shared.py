"""Forward over shared KV: many queries, one stretch of slots.

The queries of a pack are stacked with their GQA heads into the rows of one tile, so that each KV
tile is loaded once for all of them (PAT §5.2). Persistent: a CTA takes work items off the tile's
queue, heaviest first, until it is empty (PersistentKV §3.4).
"""

import triton
import triton.language as tl

from .common import (
    E_PARTIAL,
    E_ROW,
    ENTRY_WORDS,
    H_ENTRIES,
    H_QUEUES,
    I_ENTRY,
    I_LEN,
    I_NUM_QUERIES,
    I_NUM_SPLITS,
    I_SEGMENT,
    I_SPLIT,
    ITEM_WORDS,
    LOG2_E,
    attend,
    soft_cap,
    split_range,
    store,
)


@triton.jit
def _block(
    n, end, b_q, b_max, b_sum, b_acc, p_k, p_v, p_slots, stride_k, stride_v, mask_d, qk_scale, cap,
    BLOCK_N: tl.constexpr, PARTIAL: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Attend over one KV block; only one that ends beyond the stretch (PARTIAL) pays for masks."""
    offs_n = n + tl.arange(0, BLOCK_N)
    if PARTIAL:
        mask_n = offs_n < end
        b_index = tl.load(p_slots + offs_n, mask=mask_n, other=0).to(tl.int64)
        mask_dn, mask_nd = mask_d[:, None] & mask_n[None, :], mask_n[:, None] & mask_d[None, :]
    else:
        b_index = tl.load(p_slots + offs_n).to(tl.int64)
        mask_dn, mask_nd = mask_d[:, None], mask_d[None, :]
    # [BLOCK_D, BLOCK_N]
    b_k = tl.load(p_k[:, None] + b_index[None, :] * stride_k, mask=mask_dn, other=0.0)
    b_s = tl.dot(b_q, b_k, input_precision="ieee") * qk_scale
    if HAS_SOFT_CAP:
        b_s = soft_cap(b_s, cap)
    if PARTIAL:
        b_s = tl.where(mask_n[None, :], b_s, float("-inf"))
    # [BLOCK_N, BLOCK_D]
    b_v = tl.load(p_v[None, :] + b_index[:, None] * stride_v, mask=mask_nd, other=0.0)
    return attend(b_s, b_v, b_max, b_sum, b_acc)


@triton.jit
def shared_kernel(
    q_ptr,  # [>= B, Hq, D]
    k_ptr,  # [slots, Hkv, D]
    v_ptr,  # [slots, Hkv, D]
    out_ptr,  # [>= B, Hq, D]
    out_lse_ptr,  # float32 [>= B, Hq], base 2, written where HAS_LSE
    partial_out_ptr,  # [partials, Hq, D]
    partial_state_ptr,  # float32 [partials, Hq, 2]: LSE in base 2, scale of the row
    plan_ptr,  # int32 [words]
    kv_indices_ptr,  # int32 [entries]
    seq_lens_ptr,  # int [>= B], not read here: shared stretches do not grow
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
    TILE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    p_items = plan_ptr + tl.load(plan_ptr + H_QUEUES + 2 * TILE)
    num_tickets = tl.load(plan_ptr + H_QUEUES + 2 * TILE + 1) * NUM_KV_HEADS
    p_entries = plan_ptr + tl.load(plan_ptr + H_ENTRIES)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    offs_m = tl.arange(0, BLOCK_M)
    i_query = offs_m // GROUP

    ticket = tl.program_id(0)
    while ticket < num_tickets:
        p_item = p_items + (ticket // NUM_KV_HEADS) * ITEM_WORDS
        i_head = ticket % NUM_KV_HEADS
        i_split = tl.load(p_item + I_SPLIT)
        start, end = split_range(tl.load(p_item + I_LEN), i_split, tl.load(p_item + I_NUM_SPLITS))
        p_slots = kv_indices_ptr + tl.load(p_item + I_SEGMENT)
        p_entry = p_entries + (tl.load(p_item + I_ENTRY) + i_query) * ENTRY_WORDS
        mask_m = i_query < tl.load(p_item + I_NUM_QUERIES)
        b_row = tl.load(p_entry + E_ROW, mask=mask_m, other=0)
        b_partial = tl.load(p_entry + E_PARTIAL, mask=mask_m, other=0) + i_split
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
        whole = start + (end - start) // BLOCK_N * BLOCK_N
        qk_scale = sm_scale * LOG2_E
        for n in range(start, whole, BLOCK_N):
            b_max, b_sum, b_acc = _block(
                n, end, b_q, b_max, b_sum, b_acc, p_k, p_v, p_slots, stride_k, stride_v, mask_d,
                qk_scale, logits_soft_cap, BLOCK_N, False, HAS_SOFT_CAP,
            )  # fmt: skip
        if whole < end:
            b_max, b_sum, b_acc = _block(
                whole, end, b_q, b_max, b_sum, b_acc, p_k, p_v, p_slots, stride_k, stride_v,
                mask_d, qk_scale, logits_soft_cap, BLOCK_N, True, HAS_SOFT_CAP,
            )  # fmt: skip

        # taken at the end, so that the queue balances; other CTAs hide its latency
        next_ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed") + tl.num_programs(0)
        store(
            b_acc, b_max, b_sum, b_row, b_partial, i_qo_head, mask_m, offs_d, mask_d,
            out_ptr, out_lse_ptr, partial_out_ptr, partial_state_ptr, stride_out,
            NUM_KV_HEADS * GROUP, HEAD_DIM, HAS_LSE,
        )  # fmt: skip
        ticket = next_ticket
