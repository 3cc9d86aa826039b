"""What a warpgroup makes of 64 finished rows: outputs, or partial results that count as a part."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .shape import (
    HALF_ROWS,
    I_COUNTER,
    I_PART,
    I_PARTIAL,
    I_PARTS,
    I_QUERIES,
    TILE_ROWS,
    group_barrier,
)
from .softmax import with_sink


@gluon.jit
def store_results(
    acc, b_max, b_sum, base, rows, head, p_item, out_ptr, lse_ptr, partial_out_ptr,
    partial_state_ptr, sinks_ptr, stride_out, S,
):  # fmt: skip
    """Store tile rows [base, base + 64) of an item: acc [64, D], unnormalised, with the maxima
    and sums [64, 4] of softmax.py. Returns of how many parts they are one.
    """
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    OR: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    # results as they are stored, 16 bytes a thread
    WL: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // S.HEAD_DIM, S.HEAD_DIM // 8], [4, 1], [1, 0]
    )
    offs_w = gl.arange(0, HALF_ROWS, gl.SliceLayout(1, WL))
    offs_o = gl.arange(0, HALF_ROWS, OR)
    offs_d = gl.arange(0, S.HEAD_DIM, gl.SliceLayout(0, WL))
    # words again rather than before the loop over blocks, which has no register to spare
    parts = gl.load(p_item + I_PARTS)
    row_max = gl.convert_layout(gl.max(b_max, 1), OR)
    total = gl.convert_layout(gl.sum(b_sum, 1), OR)
    inv = gl.where(total > 0, 1.0 / total, 0.0)  # rows without a token in this part add nothing
    if parts == 1:
        row = base + offs_w
        ok = row < rows
        query = gl.load(p_item + I_QUERIES + row // S.GROUP, mask=ok, other=0)
        i_head = head * S.GROUP + row % S.GROUP
        p_out = out_ptr + query.to(gl.int64) * stride_out + i_head * S.HEAD_DIM
        factor, most, whole = with_sink(inv, row_max, total, sinks_ptr, head, base + offs_o, S)
        result = gl.convert_layout((acc * factor[:, None]).to(DTYPE), WL)
        gl.store(p_out[:, None] + offs_d[None, :], result, mask=ok[:, None])
        if S.HAS_LSE:
            row_o = base + offs_o
            ok_o = row_o < rows
            query_o = gl.load(p_item + I_QUERIES + row_o // S.GROUP, mask=ok_o, other=0)
            p_lse = lse_ptr + query_o * (S.HEADS * S.GROUP) + head * S.GROUP
            gl.store(p_lse + row_o % S.GROUP, most + gl.log2(whole), mask=ok_o)
    elif S.INVARIANT:
        # sums as they are: a part that a row has no token in changes nothing of it when it is added
        tile = gl.load(p_item + I_PARTIAL) + gl.load(p_item + I_PART)
        first = (tile * S.HEADS + head).to(gl.int64) * TILE_ROWS + base
        offs_c = gl.arange(0, S.HEAD_DIM, gl.SliceLayout(0, acc.type.layout))
        ok_o = base + offs_o < rows
        p_partial = partial_out_ptr + (first + offs_o) * S.HEAD_DIM
        gl.store(p_partial[:, None] + offs_c[None, :], acc, mask=ok_o[:, None])
        p_state = partial_state_ptr + (first + offs_o) * 2
        gl.store(p_state, row_max, mask=ok_o)
        gl.store(p_state + 1, total, mask=ok_o)
    else:
        # half-precision partial rows are scaled to [-1, 1]: exact range, 11 bits of the row's
        # largest
        top = gl.maximum(gl.max(gl.abs(acc), 1), 1e-30)
        scaled = gl.convert_layout((acc * (1.0 / top)[:, None]).to(gl.float16), WL)
        tile = gl.load(p_item + I_PARTIAL) + gl.load(p_item + I_PART)
        first = (tile * S.HEADS + head).to(gl.int64) * TILE_ROWS + base
        p_partial = partial_out_ptr + (first + offs_w) * S.HEAD_DIM
        ok = base + offs_w < rows
        gl.store(p_partial[:, None] + offs_d[None, :], scaled, mask=ok[:, None])
        p_state = partial_state_ptr + (first + offs_o) * 2
        ok_o = base + offs_o < rows
        gl.store(p_state, row_max + gl.log2(total), mask=ok_o)
        gl.store(p_state + 1, top * inv, mask=ok_o)
    return parts


@gluon.jit
def count_part(base, head, p_item, counters_ptr, S):
    """Count stored rows [base, base + 64) as a part."""
    p_counter = counters_ptr + (gl.load(p_item + I_COUNTER) * S.HEADS + head) * 2
    group_barrier()  # the stores of all warps before the count
    gl.atomic_add(p_counter + base // HALF_ROWS, 1, sem="release", scope="gpu")
