"""The portable kernel's loop over an item's blocks: softmax(q k) v, online."""

import triton
import triton.language as tl

from sgl_prefix_attn.kernels import words as W

from ..aggregate import aggregate
from .narrow_kv import is_narrow, product_dtype, scaled_queries, widen

PRE, BLOCK, H_STEPS = tl.constexpr(W.PRE), tl.constexpr(W.BLOCK), tl.constexpr(W.H_STEPS)
I_BLOCKS, I_ROWS, I_GROWING = (tl.constexpr(x) for x in (W.I_BLOCKS, W.I_ROWS, W.I_GROWING))
I_REST, I_QUERIES = tl.constexpr(W.I_REST), tl.constexpr(W.I_QUERIES)
LOG2_E = tl.constexpr(1.4426950408889634)
# below every score: rows that have seen no column yet must not make inf - inf
LOWEST = tl.constexpr(-1.0e30)


@aggregate
class Shape:
    """What the kernel is compiled for.

    HEADS      KV heads; GROUP query heads each; HEAD_DIM, and BLOCK_D, that rounded up to a power
               of two
    TILE_ROWS  of the plan; BIT_KEYS has_bit_keys of words.py for these
    BLOCK_N    columns at once, a divisor of BLOCK
    STAGES     of the pipelined loop
    CHUNK      columns of one tensor of results: BLOCK_D, a half or a quarter of it
    HAS_CAP    cap the logits; HAS_LSE write the LSE; HAS_SINK add a sink to each row
    INVARIANT  over aligned plans a row's bits do not depend on other rows
    """

    HEADS: tl.constexpr
    GROUP: tl.constexpr
    HEAD_DIM: tl.constexpr
    BLOCK_D: tl.constexpr
    TILE_ROWS: tl.constexpr
    BLOCK_N: tl.constexpr
    STAGES: tl.constexpr
    BIT_KEYS: tl.constexpr
    HAS_CAP: tl.constexpr
    HAS_LSE: tl.constexpr
    HAS_SINK: tl.constexpr
    CHUNK: tl.constexpr
    INVARIANT: tl.constexpr


@triton.jit
def sees(key, row, GROUP: tl.constexpr, BIT_KEYS: tl.constexpr):
    """Return bool [rows, columns]: which rows a column is for; key as in words.py."""
    if BIT_KEYS:
        return (key[None, :] & (1 << (row // GROUP))[:, None]) != 0
    return (row[:, None] >= (key & 0xFFFF)[None, :]) & (row[:, None] < (key >> 16)[None, :])


@triton.jit
def soft_cap(s, cap):
    """Return logits in units of log2(e), capped; tanh through the sigmoid."""
    x = s / (cap * LOG2_E)
    return (cap * LOG2_E) * (2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def blocks_of(p_item, words_ptr):
    """Count the blocks of an item, those that grew since the plan included."""
    grown = tl.load(words_ptr + H_STEPS) * tl.load(p_item + I_GROWING)
    return tl.load(p_item + I_BLOCKS) + (grown + BLOCK - 1) // BLOCK


@triton.jit
def block_at(i_item, rest, b):
    """Return where block b of an item lies; rest is its I_REST."""
    return tl.where(b < PRE, i_item * PRE + b, rest + b - PRE)


@triton.jit
def _finite(p_v, at, there, stride_v, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return bool [N]: which columns' values are numbers, all of them."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (offs_d < HEAD_DIM)[None, :]
    v = widen(tl.load((p_v + offs_d)[None, :] + at[:, None] * stride_v, mask=mask, other=0.0))
    v = v.to(tl.float32)
    return tl.max(tl.where(v - v == 0.0, 0, 1), 1) == 0


@triton.jit
def _add_values(
    acc, p, shrink, p_v, at, there, stride_v,
    D: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Columns [D, D + CHUNK) of the results, one block further."""
    offs_d = D + tl.arange(0, CHUNK)
    mask = there[:, None] & (offs_d < HEAD_DIM)[None, :]
    # [N, CHUNK]
    v = tl.load((p_v + offs_d)[None, :] + at[:, None] * stride_v, mask=mask, other=0.0)
    return tl.dot(p, widen(v), acc * shrink[:, None], input_precision="ieee")


@triton.jit
def attend(
    p_item, i_item, head, q_ptr, k_ptr, v_ptr, words_ptr, slots_ptr, keys_ptr, stride_q,
    stride_k, stride_v, sm_scale, cap, v_scale, S, BLOCK_M: tl.constexpr,
    CLEAN: tl.constexpr = False,
):  # fmt: skip
    """Attend with an item's rows over its blocks: results [M, D], unnormalised, maxima and sums
    [M], base 2.

    CLEAN: columns whose values are not finite get values of 0 and scores of NaN, which stay with
    the rows that see them. All other rows have the same bits as without.

    Results are up to four tensors of CHUNK columns. Triton lets the warps of an mma.sync share the
    wider side of its result, so that with more columns than rows every warp holds all of q.
    """
    SUBS: tl.constexpr = BLOCK // S.BLOCK_N
    row = tl.arange(0, BLOCK_M)
    ok = row < tl.load(p_item + I_ROWS)
    offs_d = tl.arange(0, S.BLOCK_D)
    offs_n = tl.arange(0, S.BLOCK_N)
    mask_d = offs_d < S.HEAD_DIM
    query = tl.load(p_item + I_QUERIES + row // S.GROUP, mask=ok, other=0).to(tl.int64)
    p_q = q_ptr + query * stride_q + (head * S.GROUP + row % S.GROUP) * S.HEAD_DIM
    q = tl.load(p_q[:, None] + offs_d[None, :], mask=ok[:, None] & mask_d[None, :], other=0.0)
    p_k = k_ptr + head * S.HEAD_DIM + offs_d
    p_v = v_ptr + head * S.HEAD_DIM
    b_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, S.CHUNK], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    scale = sm_scale * LOG2_E
    NARROW: tl.constexpr = is_narrow(k_ptr.dtype.element_ty)
    if NARROW:
        q, scale = scaled_queries(q, scale)
    rest = tl.load(p_item + I_REST)
    for n in tl.range(0, blocks_of(p_item, words_ptr) * SUBS, num_stages=S.STAGES):
        b = n // SUBS
        place = block_at(i_item, rest, b) * BLOCK + (n - b * SUBS) * S.BLOCK_N
        slot = tl.load(slots_ptr + place + offs_n)
        key = tl.load(keys_ptr + place + offs_n)
        there = slot >= 0
        at = slot.to(tl.int64)
        # [D, N]
        k = tl.load(
            p_k[:, None] + at[None, :] * stride_k, mask=mask_d[:, None] & there[None, :], other=0.0
        )
        s = tl.dot(q, widen(k), input_precision="ieee") * scale
        if S.HAS_CAP:
            s = soft_cap(s, cap)
        if CLEAN:
            finite = _finite(p_v, at, there, stride_v, S.HEAD_DIM, S.BLOCK_D)
            s = tl.where(finite[None, :], s, float("nan"))
            there &= finite
        s = tl.where(sees(key, row, S.GROUP, S.BIT_KEYS), s, float("-inf"))
        new_max = tl.maximum(b_max, tl.max(s, 1))
        p = tl.exp2(s - new_max[:, None])
        shrink = tl.exp2(b_max - new_max)
        b_sum = b_sum * shrink + tl.sum(p, 1)
        p = p.to(product_dtype(v_ptr.dtype.element_ty))
        acc0 = _add_values(acc0, p, shrink, p_v, at, there, stride_v, 0, S.HEAD_DIM, S.CHUNK)
        if S.CHUNK < S.BLOCK_D:
            acc1 = _add_values(
                acc1, p, shrink, p_v, at, there, stride_v, S.CHUNK, S.HEAD_DIM, S.CHUNK
            )
        if 2 * S.CHUNK < S.BLOCK_D:
            acc2 = _add_values(
                acc2, p, shrink, p_v, at, there, stride_v, 2 * S.CHUNK, S.HEAD_DIM, S.CHUNK
            )
            acc3 = _add_values(
                acc3, p, shrink, p_v, at, there, stride_v, 3 * S.CHUNK, S.HEAD_DIM, S.CHUNK
            )
        b_max = new_max
    if NARROW:
        acc0, acc1, acc2, acc3 = acc0 * v_scale, acc1 * v_scale, acc2 * v_scale, acc3 * v_scale
    return acc0, acc1, acc2, acc3, b_max, b_sum
