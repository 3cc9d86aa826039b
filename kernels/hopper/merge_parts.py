"""Merging the parts of a split tile, inside the kernel: every part merges its share of the rows.

The order of parts is fixed, so results are the same bits from run to run whoever is last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .shape import (
    HALF_ROWS,
    I_COUNTER,
    I_PART,
    I_PARTIAL,
    I_QUERIES,
    LOWEST,
    TILE_ROWS,
    group_barrier,
    read_counter,
)
from .softmax import with_sink

MOST_POLLS = gl.constexpr(1 << 24)
LEFT = gl.constexpr(1 << 16)  # more than the parts of a tile


@gluon.jit
def wait_for_parts(p_counter, parts):
    """Wait until all parts of a tile are counted; below zero they are, and the first has left."""
    polls = 0
    counted = 0
    while (counted >= 0) & (counted < parts):
        counted = read_counter(p_counter)
        polls += 1
        # in builds for debugging (TRITON_DEBUG=1) alone: seconds, where a part takes microseconds
        gl.device_assert(polls < MOST_POLLS, "a part of this tile was never counted")


@gluon.jit
def leave(p_counter, part, parts):
    """Count that a part has merged its share. The first takes off all that the others count: when
    all have left, the counter is 0 again, for the next launch, and nobody had to hear who is last.
    """
    group_barrier()  # a warp that still polls would wait for good
    left = gl.where(part == 0, LEFT - (LEFT + 1) * parts, LEFT)
    gl.atomic_add(p_counter, left, sem="relaxed", scope="gpu")


@gluon.jit
def add_parts(row_max, total, acc, lse, scale, out, LOR: gl.constexpr):
    """Add some parts of rows, lse and scale [PARTS, ROWS] and out [PARTS, ROWS, columns], to what
    is merged so far, in base 2."""
    new_max = gl.maximum(row_max, gl.max(lse, 0))
    weight = gl.exp2(lse - new_max[None, :])
    old = gl.exp2(row_max - new_max)
    total = total * old + gl.sum(weight, 0)
    acc = acc * gl.convert_layout(old, LOR)[:, None]
    acc += gl.sum(out.to(gl.float32) * (weight * scale)[:, :, None], 0)
    return new_max, total, acc


@gluon.jit
def merge_share(
    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, sinks_ptr, p_item, head,
    rows, parts, stride_out, S, WG: gl.constexpr,
):  # fmt: skip
    """Wait until all parts of these 64 rows are counted, then merge this part's share of them."""
    wide = rows > HALF_ROWS
    side = gl.where(wide, WG, 0)
    base = side * HALF_ROWS
    p_counter = counters_ptr + (gl.load(p_item + I_COUNTER) * S.HEADS + head) * 2 + side
    wait_for_parts(p_counter, parts)
    share = (gl.minimum(rows - base, HALF_ROWS) + parts - 1) // parts
    part = gl.load(p_item + I_PART)
    first = base + part * share
    end = gl.minimum(gl.minimum(first + share, base + HALF_ROWS), rows)
    # A thread holds 8 columns of a row: how many rows four warps hold, or twice as many
    FEW: gl.constexpr = 1024 // S.HEAD_DIM
    if S.INVARIANT:
        merge_rows_in_order(
            out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, sinks_ptr, p_item, head, parts,
            first, end, stride_out, S, FEW,
        )  # fmt: skip
    elif parts <= 4:
        merge_rows(
            out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, sinks_ptr, p_item, head, parts,
            first, end, stride_out, S, 4, 2 * FEW,
        )  # fmt: skip
    else:
        merge_rows(
            out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, sinks_ptr, p_item, head, parts,
            first, end, stride_out, S, 8, FEW,
        )  # fmt: skip
    leave(p_counter, part, parts)


@gluon.jit
def merge_rows(
    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, sinks_ptr, p_item, head, parts, first,
    end, stride_out, S, PARTS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Merge tile rows [first, end), ROWS at a time, from PARTS parts at a time, in base 2."""
    D: gl.constexpr = S.HEAD_DIM
    # [PARTS, ROWS, D]
    L3: gl.constexpr = gl.BlockedLayout(
        [PARTS, ROWS * D // 1024, 8], [1, 256 // D, D // 8], [1, 4, 1], [2, 1, 0]
    )
    LS: gl.constexpr = gl.SliceLayout(2, L3)  # [PARTS, ROWS]
    LR: gl.constexpr = gl.SliceLayout(0, LS)  # [ROWS]
    LO: gl.constexpr = gl.SliceLayout(0, L3)  # [ROWS, D]
    LOR: gl.constexpr = gl.SliceLayout(1, LO)
    offs_p = gl.arange(0, PARTS, gl.SliceLayout(1, LS))
    offs_r = gl.arange(0, ROWS, gl.SliceLayout(0, LS))
    offs_o = gl.arange(0, ROWS, LOR)
    offs_l = gl.arange(0, ROWS, LR)
    offs_3d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, L3)))
    offs_d = gl.arange(0, D, gl.SliceLayout(0, LO))
    partial = gl.load(p_item + I_PARTIAL)
    for r in range(first, end, ROWS):
        row_max = gl.full([ROWS], LOWEST, gl.float32, LR)
        total = gl.zeros([ROWS], gl.float32, LR)
        acc = gl.zeros([ROWS, D], gl.float32, LO)
        for p in range(0, parts, PARTS):
            i_tile = ((partial + p + offs_p) * S.HEADS + head).to(gl.int64)
            i = (i_tile * TILE_ROWS)[:, None] + (r + offs_r)[None, :]
            ok = (p + offs_p < parts)[:, None] & (r + offs_r < end)[None, :]
            # past the first-level cache: other CTAs wrote these
            p_state = partial_state_ptr + i * 2
            b_lse = gl.load(p_state, mask=ok, other=float("-inf"), cache_modifier=".cg")
            b_scale = gl.load(p_state + 1, mask=ok, other=0.0, cache_modifier=".cg")
            b_out = gl.load(
                partial_out_ptr + (i * D)[:, :, None] + offs_3d[None, None, :],
                mask=ok[:, :, None],
                other=0.0,
                cache_modifier=".cg",
            )
            row_max, total, acc = add_parts(row_max, total, acc, b_lse, b_scale, b_out, LOR)
        inv = gl.where(total > 0, 1.0 / total, 0.0)
        inv, row_max, total = with_sink(inv, row_max, total, sinks_ptr, head, r + offs_l, S)
        inv = gl.convert_layout(inv, LOR)
        row = r + offs_o
        ok_o = row < end
        query = gl.load(p_item + I_QUERIES + row // S.GROUP, mask=ok_o, other=0)
        p_out = out_ptr + query.to(gl.int64) * stride_out + (head * S.GROUP + row % S.GROUP) * D
        result = (acc * inv[:, None]).to(out_ptr.dtype.element_ty)
        gl.store(p_out[:, None] + offs_d[None, :], result, mask=ok_o[:, None])
        if S.HAS_LSE:
            row_l = r + offs_l
            ok_l = row_l < end
            query_l = gl.load(p_item + I_QUERIES + row_l // S.GROUP, mask=ok_l, other=0)
            p_lse = lse_ptr + query_l * (S.HEADS * S.GROUP) + head * S.GROUP + row_l % S.GROUP
            gl.store(p_lse, row_max + gl.log2(total), mask=ok_l)


@gluon.jit
def merge_rows_in_order(
    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, sinks_ptr, p_item, head, parts, first,
    end, stride_out, S, ROWS: gl.constexpr,
):  # fmt: skip
    """Merge tile rows [first, end), ROWS at a time, one part after the other, in base 2: sums have
    one order however many parts the tile has, and a part without a row's tokens adds zeros."""
    D: gl.constexpr = S.HEAD_DIM
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    offs_r = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    offs_d = gl.arange(0, D, gl.SliceLayout(0, L))
    partial = gl.load(p_item + I_PARTIAL)
    for r in range(first, end, ROWS):
        row = r + offs_r
        ok = row < end
        row_max = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, L))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, L))
        acc = gl.zeros([ROWS, D], gl.float32, L)
        for p in range(0, parts, 4):  # the loads of four are on their way at once
            first_p = partial + p
            max0, sum0, acc0 = load_part(
                partial_out_ptr, partial_state_ptr, first_p, head, row, ok, offs_d, S
            )
            max1, sum1, acc1 = load_part(
                partial_out_ptr, partial_state_ptr, first_p + 1, head, row, ok & (p + 1 < parts),
                offs_d, S,
            )  # fmt: skip
            max2, sum2, acc2 = load_part(
                partial_out_ptr, partial_state_ptr, first_p + 2, head, row, ok & (p + 2 < parts),
                offs_d, S,
            )  # fmt: skip
            max3, sum3, acc3 = load_part(
                partial_out_ptr, partial_state_ptr, first_p + 3, head, row, ok & (p + 3 < parts),
                offs_d, S,
            )  # fmt: skip
            row_max, total, acc = add_part(row_max, total, acc, max0, sum0, acc0)
            row_max, total, acc = add_part(row_max, total, acc, max1, sum1, acc1)
            row_max, total, acc = add_part(row_max, total, acc, max2, sum2, acc2)
            row_max, total, acc = add_part(row_max, total, acc, max3, sum3, acc3)
        inv = gl.where(total > 0, 1.0 / total, 0.0)
        inv, row_max, total = with_sink(inv, row_max, total, sinks_ptr, head, row, S)
        query = gl.load(p_item + I_QUERIES + row // S.GROUP, mask=ok, other=0)
        p_out = out_ptr + query.to(gl.int64) * stride_out + (head * S.GROUP + row % S.GROUP) * D
        result = (acc * inv[:, None]).to(out_ptr.dtype.element_ty)
        gl.store(p_out[:, None] + offs_d[None, :], result, mask=ok[:, None])
        if S.HAS_LSE:
            p_lse = lse_ptr + query * (S.HEADS * S.GROUP) + head * S.GROUP + row % S.GROUP
            gl.store(p_lse, row_max + gl.log2(total), mask=ok)


@gluon.jit
def load_part(partial_out_ptr, partial_state_ptr, tile, head, row, ok, offs_d, S):
    """Load a part's maxima and sums [ROWS] and results [ROWS, D]; zeros where not ok."""
    i = (tile * S.HEADS + head).to(gl.int64) * TILE_ROWS + row
    # past the first-level cache: other CTAs wrote these
    p_state = partial_state_ptr + i * 2
    b_max = gl.load(p_state, mask=ok, other=LOWEST, cache_modifier=".cg")
    b_sum = gl.load(p_state + 1, mask=ok, other=0.0, cache_modifier=".cg")
    b_acc = gl.load(
        partial_out_ptr + (i * S.HEAD_DIM)[:, None] + offs_d[None, :], mask=ok[:, None], other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    return b_max, b_sum, b_acc


@gluon.jit
def add_part(row_max, total, acc, b_max, b_sum, b_acc):
    """Return maxima, sums and results with those of one more part."""
    new_max = gl.maximum(row_max, b_max)
    old = gl.exp2(row_max - new_max)
    weight = gl.exp2(b_max - new_max)
    return (
        new_max,
        total * old + b_sum * weight,
        acc * old[:, None] + b_acc * weight[:, None],
    )
