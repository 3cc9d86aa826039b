"""What the two forward kernels share: the words, the softmax step, the store of results."""

import triton
import triton.language as tl

from .. import layout as L

H_QUEUES, H_ENTRIES = tl.constexpr(L.H_QUEUES), tl.constexpr(L.H_ENTRIES)
ITEM_WORDS, ENTRY_WORDS = tl.constexpr(L.ITEM_WORDS), tl.constexpr(L.ENTRY_WORDS)
I_SEGMENT, I_LEN = tl.constexpr(L.I_SEGMENT), tl.constexpr(L.I_LEN)
I_SPLIT, I_NUM_SPLITS = tl.constexpr(L.I_SPLIT), tl.constexpr(L.I_NUM_SPLITS)
I_ENTRY, I_NUM_QUERIES = tl.constexpr(L.I_ENTRY), tl.constexpr(L.I_NUM_QUERIES)
E_ROW, E_PARTIAL = tl.constexpr(L.E_ROW), tl.constexpr(L.E_PARTIAL)
E_DST, E_START = tl.constexpr(L.E_DST), tl.constexpr(L.E_START)
SPLIT_UNIT = tl.constexpr(L.SPLIT_UNIT)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_range(kv_len, i_split, num_splits):
    """Return [start, end) of split i_split, row-local (PersistentKV §3.3); SPLIT_UNIT."""
    units = (kv_len + SPLIT_UNIT - 1) // SPLIT_UNIT
    start = SPLIT_UNIT * (i_split * units // num_splits)
    end = tl.minimum(SPLIT_UNIT * ((i_split + 1) * units // num_splits), kv_len)
    return start, end


@triton.jit
def soft_cap(b_s, cap):
    """Cap logits in units of log2(e) as cap * tanh(s / cap); tanh through the sigmoid."""
    b_x = b_s / (cap * LOG2_E)
    return (cap * LOG2_E) * (2.0 * tl.sigmoid(2.0 * b_x) - 1.0)


@triton.jit
def attend(b_s, b_v, b_max, b_sum, b_acc):
    """Take one step of online softmax in base 2: scores [M, N] (-inf: masked), values [N, D].

    Every row must have met a score above -inf by the end of its first step.
    """
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
    b_p = tl.exp2(b_s - b_new_max[:, None])
    b_scale = tl.exp2(b_max - b_new_max)
    b_sum = b_sum * b_scale + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_scale[:, None], input_precision="ieee")
    return b_new_max, b_sum, b_acc


@triton.jit
def store(
    b_acc,  # [M, D] not yet normalised
    b_max,
    b_sum,
    b_row,  # [M] output row
    b_partial,  # [M] partial row, or DIRECT
    i_qo_head,  # [M]
    mask_m,
    offs_d,
    mask_d,
    out_ptr,
    out_lse_ptr,
    partial_out_ptr,
    partial_state_ptr,
    stride_out,
    NUM_QO_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Normalise, then write each row to the output (its only part) or to its partial row."""
    b_acc = b_acc / b_sum[:, None]
    b_lse = b_max + tl.log2(b_sum)
    direct = mask_m & (b_partial < 0)
    partial = mask_m & (b_partial >= 0)
    p_out = out_ptr + b_row.to(tl.int64) * stride_out + i_qo_head * HEAD_DIM
    tl.store(
        p_out[:, None] + offs_d[None, :],
        b_acc.to(out_ptr.dtype.element_ty),
        mask=direct[:, None] & mask_d[None, :],
    )
    if HAS_LSE:
        tl.store(out_lse_ptr + b_row * NUM_QO_HEADS + i_qo_head, b_lse, mask=direct)
    # half-precision partial rows are scaled to [-1, 1]: exact range, 11 bits of the row's largest
    i_partial = b_partial.to(tl.int64) * NUM_QO_HEADS + i_qo_head
    b_scale = tl.maximum(tl.max(tl.abs(b_acc), 1), 1e-30)
    tl.store(
        partial_out_ptr + i_partial[:, None] * HEAD_DIM + offs_d[None, :],
        (b_acc / b_scale[:, None]).to(partial_out_ptr.dtype.element_ty),
        mask=partial[:, None] & mask_d[None, :],
    )
    tl.store(partial_state_ptr + i_partial * 2, b_lse, mask=partial)
    tl.store(partial_state_ptr + i_partial * 2 + 1, b_scale, mask=partial)
