"""One row of an item by itself, without tensor cores.

A product multiplies every value row with every query row, and 0 x NaN is NaN: a masked weight does
not keep a NaN or an infinity from rows that must not see it. An item whose results are not finite
is run again, row by row, over what each row sees. That is slow, and nothing is lost: such an item
holds results that nobody can use.
"""

import triton
import triton.language as tl

from .block_loop import (
    BLOCK,
    I_QUERIES,
    I_REST,
    LOG2_E,
    LOWEST,
    block_at,
    blocks_of,
    sees,
    soft_cap,
)
from .narrow_kv import is_narrow, widen

COLUMNS = tl.constexpr(16)


@triton.jit
def attend_alone(
    p_item, i_item, head, row, q_ptr, k_ptr, v_ptr, words_ptr, slots_ptr, keys_ptr, stride_q,
    stride_k, stride_v, sm_scale, cap, v_scale, S,
):  # fmt: skip
    """Attend with a tile row over an item's blocks: result [1, D], unnormalised, maximum and sum
    [1]."""
    offs_d = tl.arange(0, S.BLOCK_D)
    offs_n = tl.arange(0, COLUMNS)
    mask_d = offs_d < S.HEAD_DIM
    rows = row + tl.zeros([1], tl.int32)
    i_query = row // S.GROUP
    query = tl.load(p_item + I_QUERIES + i_query).to(tl.int64)
    # Triton's interpreter has no row % S.GROUP.
    p_q = q_ptr + query * stride_q + ((head - i_query) * S.GROUP + row) * S.HEAD_DIM
    q = tl.load(p_q + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    b_max = LOWEST + tl.zeros([1], tl.float32)
    b_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, S.BLOCK_D], tl.float32)
    SUBS: tl.constexpr = BLOCK // COLUMNS
    rest = tl.load(p_item + I_REST)
    for n in range(0, blocks_of(p_item, words_ptr) * SUBS):
        b = n // SUBS
        place = block_at(i_item, rest, b) * BLOCK + (n - b * SUBS) * COLUMNS
        slot = tl.load(slots_ptr + place + offs_n)
        key = tl.load(keys_ptr + place + offs_n)
        seen = sees(key, rows, S.GROUP, S.BIT_KEYS) & (slot >= 0)[None, :]
        mine = tl.max(seen.to(tl.int32), 0) != 0
        at = slot.to(tl.int64)[:, None]
        offs = head * S.HEAD_DIM + offs_d[None, :]
        mask = mine[:, None] & mask_d[None, :]
        k = widen(tl.load(k_ptr + at * stride_k + offs, mask=mask, other=0.0)).to(tl.float32)
        v = widen(tl.load(v_ptr + at * stride_v + offs, mask=mask, other=0.0)).to(tl.float32)
        s = tl.sum(q[None, :] * k, 1)[None, :] * (sm_scale * LOG2_E)
        if S.HAS_CAP:
            s = soft_cap(s, cap)
        s = tl.where(seen, s, float("-inf"))
        new_max = tl.maximum(b_max, tl.max(s, 1))
        p = tl.exp2(s - new_max[:, None])
        shrink = tl.exp2(b_max - new_max)
        b_sum = b_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.sum(tl.sum(p, 0)[:, None] * v, 0)[None, :]
        b_max = new_max
    if is_narrow(v_ptr.dtype.element_ty):
        acc = acc * v_scale
    return acc, b_max, b_sum
