"""The persistent forward kernel: every CTA takes work items off its tile's queue until it is empty.

Queries of a pack are stacked with their GQA heads into the rows of one tile, so that a KV tile is
loaded once for all of them (PAT §5.2; PersistentKV §3.4 for the compact queue).
"""

import triton
import triton.language as tl

from .. import layout as L

H_QUEUES, H_TAILS, H_ENTRIES = (
    tl.constexpr(L.H_QUEUES),
    tl.constexpr(L.H_TAILS),
    tl.constexpr(L.H_ENTRIES),
)
ITEM_WORDS, ENTRY_WORDS, TAIL_WORDS = (
    tl.constexpr(L.ITEM_WORDS),
    tl.constexpr(L.ENTRY_WORDS),
    tl.constexpr(L.TAIL_WORDS),
)
I_SEGMENT, I_LEN, I_TAIL = tl.constexpr(L.I_SEGMENT), tl.constexpr(L.I_LEN), tl.constexpr(L.I_TAIL)
I_SPLIT, I_NUM_SPLITS = tl.constexpr(L.I_SPLIT), tl.constexpr(L.I_NUM_SPLITS)
I_ENTRY, I_NUM_QUERIES = tl.constexpr(L.I_ENTRY), tl.constexpr(L.I_NUM_QUERIES)
E_ROW, E_SLOT, T_START = tl.constexpr(L.E_ROW), tl.constexpr(L.E_SLOT), tl.constexpr(L.T_START)
GROWS, SPLIT_UNIT = tl.constexpr(L.GROWS), tl.constexpr(L.SPLIT_UNIT)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _item_range(p_item, plan_ptr, seq_lens_ptr):
    """[start, end) KV tokens of this item's split, bounded by its own row's length."""
    kv_len = tl.load(p_item + I_LEN)
    if kv_len == GROWS:
        i_tail = tl.load(p_item + I_TAIL)
        p_tail = plan_ptr + tl.load(plan_ptr + H_TAILS) + i_tail * TAIL_WORDS
        kv_len = tl.load(seq_lens_ptr + i_tail).to(tl.int32) - tl.load(p_tail + T_START)
    units = (kv_len + SPLIT_UNIT - 1) // SPLIT_UNIT
    i_split = tl.load(p_item + I_SPLIT)
    num_splits = tl.load(p_item + I_NUM_SPLITS)
    start = SPLIT_UNIT * (i_split * units // num_splits)
    end = tl.minimum(SPLIT_UNIT * ((i_split + 1) * units // num_splits), kv_len)
    return start, end, i_split


@triton.jit
def forward_kernel(
    q_ptr,  # [>= B, Hq, D]
    k_ptr,  # [slots, Hkv, D]
    v_ptr,  # [slots, Hkv, D]
    out_ptr,  # [>= B, Hq, D], written for requests with one part
    partial_out_ptr,  # float32 [partials, Hq, D]
    partial_lse_ptr,  # float32 [partials, Hq], base 2
    out_lse_ptr,  # float32 [>= B, Hq], base 2, written where HAS_LSE
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
    TILE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    NUM_QO_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    p_items = plan_ptr + tl.load(plan_ptr + H_QUEUES + 2 * TILE)
    num_tickets = tl.load(plan_ptr + H_QUEUES + 2 * TILE + 1) * NUM_KV_HEADS
    p_entries = plan_ptr + tl.load(plan_ptr + H_ENTRIES)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    offs_m = tl.arange(0, BLOCK_M)
    i_query = offs_m // GROUP
    qk_scale = sm_scale * LOG2_E

    ticket = tl.program_id(0)
    while ticket < num_tickets:
        # the next ticket travels while this item is computed
        next_ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed") + tl.num_programs(0)
        p_item = p_items + (ticket // NUM_KV_HEADS) * ITEM_WORDS
        i_head = ticket % NUM_KV_HEADS
        start, end, i_split = _item_range(p_item, plan_ptr, seq_lens_ptr)
        p_slots = kv_indices_ptr + tl.load(p_item + I_SEGMENT)
        p_entry = p_entries + tl.load(p_item + I_ENTRY) * ENTRY_WORDS
        mask_m = i_query < tl.load(p_item + I_NUM_QUERIES)
        b_row = tl.load(p_entry + i_query * ENTRY_WORDS + E_ROW, mask=mask_m, other=0)
        b_slot = tl.load(p_entry + i_query * ENTRY_WORDS + E_SLOT, mask=mask_m, other=0)
        i_qo_head = i_head * GROUP + offs_m % GROUP

        # [BLOCK_M, BLOCK_D]
        p_q = q_ptr + b_row.to(tl.int64)[:, None] * stride_q + i_qo_head[:, None] * HEAD_DIM
        mask_md = mask_m[:, None] & mask_d[None, :]
        b_q = tl.load(p_q + offs_d[None, :], mask=mask_md, other=0.0)
        p_k = k_ptr + i_head * HEAD_DIM + offs_d
        p_v = v_ptr + i_head * HEAD_DIM + offs_d

        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for n in range(start, end, BLOCK_N):
            offs_n = n + tl.arange(0, BLOCK_N)
            mask_n = offs_n < end
            b_index = tl.load(p_slots + offs_n, mask=mask_n, other=0).to(tl.int64)
            # [BLOCK_D, BLOCK_N]
            b_k = tl.load(
                p_k[:, None] + b_index[None, :] * stride_k,
                mask=mask_d[:, None] & mask_n[None, :],
                other=0.0,
            )
            b_s = tl.dot(b_q, b_k, input_precision="ieee") * qk_scale
            if HAS_SOFT_CAP:
                # cap * tanh(x / cap), through the sigmoid; qk_scale brought log2(e) in already
                b_x = b_s / (logits_soft_cap * LOG2_E)
                b_s = (logits_soft_cap * LOG2_E) * (2.0 * tl.sigmoid(2.0 * b_x) - 1.0)
            b_s = tl.where(mask_n[None, :], b_s, float("-inf"))
            b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
            b_p = tl.exp2(b_s - b_new_max[:, None])
            b_scale = tl.exp2(b_max - b_new_max)
            b_sum = b_sum * b_scale + tl.sum(b_p, 1)
            b_max = b_new_max
            # [BLOCK_N, BLOCK_D]
            b_v = tl.load(
                p_v[None, :] + b_index[:, None] * stride_v,
                mask=mask_n[:, None] & mask_d[None, :],
                other=0.0,
            )
            b_acc = b_acc * b_scale[:, None]
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")

        b_acc = b_acc / b_sum[:, None]
        b_lse = b_max + tl.log2(b_sum)
        if tl.load(p_entry + E_SLOT) < 0:
            p_out = out_ptr + b_row.to(tl.int64)[:, None] * stride_out + i_qo_head[:, None] * HEAD_DIM
            tl.store(p_out + offs_d[None, :], b_acc.to(out_ptr.dtype.element_ty), mask=mask_md)
            if HAS_LSE:
                tl.store(out_lse_ptr + b_row * NUM_QO_HEADS + i_qo_head, b_lse, mask=mask_m)
        else:
            i_partial = (b_slot + i_split).to(tl.int64) * NUM_QO_HEADS + i_qo_head
            p_out = partial_out_ptr + i_partial[:, None] * HEAD_DIM
            tl.store(p_out + offs_d[None, :], b_acc, mask=mask_md)
            tl.store(partial_lse_ptr + i_partial, b_lse, mask=mask_m)
        ticket = next_ticket
