"""Merging the parts of a split tile, inside the kernel: every part merges its share of the rows.

The two halves of the columns are counted and merged by themselves. The order of parts is fixed, so
results are the same bits from run to run whoever is last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..hopper.merge_parts import add_parts, leave, wait_for_parts
from ..hopper.shape import (
    HEADER_WORDS,
    I_COUNTER,
    I_PART,
    I_PARTIAL,
    I_PARTS,
    I_QUERIES,
    I_ROWS,
    LOWEST,
    group_barrier,
    ticket_of,
)
from .latent_results import scales_of, swap_columns
from .latent_shape import HALF, ROWS, VALUE_DIM


@gluon.jit
def count_half(p_item, counters_ptr, WG: gl.constexpr):
    """Count half WG of a part, whose results are stored."""
    group_barrier()  # the stores of all warps before the count
    gl.atomic_add(
        counters_ptr + gl.load(p_item + I_COUNTER) * 2 + WG, 1, sem="release", scope="gpu"
    )


@gluon.jit
def merge_shares(
    turns, split_turns, out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr,
    words_ptr, stride_out, S, WG: gl.constexpr,
):  # fmt: skip
    """Merge half WG of this CTA's share of every tile of which it has counted a part: split_turns
    of its turns.

    Only when the CTA has counted them all: all CTAs are resident, so each part that another waits
    for is either counted or on its way.
    """
    while split_turns > 0:
        turns -= 1
        p_item = words_ptr + HEADER_WORDS + ticket_of(turns) * S.ITEM
        parts = gl.load(p_item + I_PARTS)
        if parts > 1:
            rows = gl.load(p_item + I_ROWS)
            partial = gl.load(p_item + I_PARTIAL)
            share = (rows + parts - 1) // parts
            part = gl.load(p_item + I_PART)
            first = part * share
            end = gl.minimum(first + share, rows)
            p_counter = counters_ptr + gl.load(p_item + I_COUNTER) * 2 + WG
            wait_for_parts(p_counter, parts)
            if parts <= 4:
                merge_rows(
                    first, end, parts, partial, p_item, out_ptr, lse_ptr, partial_out_ptr,
                    partial_state_ptr, stride_out, S, WG, 4, 16, 8,
                )  # fmt: skip
            elif parts <= 8:
                merge_rows(
                    first, end, parts, partial, p_item, out_ptr, lse_ptr, partial_out_ptr,
                    partial_state_ptr, stride_out, S, WG, 8, 8, 8,
                )  # fmt: skip
            elif share > 2:
                merge_rows(
                    first, end, parts, partial, p_item, out_ptr, lse_ptr, partial_out_ptr,
                    partial_state_ptr, stride_out, S, WG, 16, 4, 8,
                )  # fmt: skip
            else:  # two warps a row
                merge_rows(
                    first, end, parts, partial, p_item, out_ptr, lse_ptr, partial_out_ptr,
                    partial_state_ptr, stride_out, S, WG, 16, 2, 4,
                )  # fmt: skip
            leave(p_counter, part, parts)
            split_turns -= 1


@gluon.jit
def merge_rows(
    first, end, parts, partial, p_item, out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr,
    stride_out, S, WG: gl.constexpr, PARTS: gl.constexpr, SOME: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Merge columns of half WG of tile rows [first, end), SOME rows at a time, from PARTS parts at
    a time, in base 2; a thread has so many COLUMNS of a row, so that all have some."""
    ABREAST: gl.constexpr = HALF // (32 * COLUMNS)  # warps on a row
    # [PARTS, SOME, HALF]
    L3: gl.constexpr = gl.BlockedLayout(
        [PARTS, SOME * ABREAST // 4, COLUMNS], [1, 1, 32], [1, 4 // ABREAST, ABREAST], [2, 1, 0]
    )
    LS: gl.constexpr = gl.SliceLayout(2, L3)  # [PARTS, SOME]
    LR: gl.constexpr = gl.SliceLayout(0, LS)  # [SOME]
    LO: gl.constexpr = gl.SliceLayout(0, L3)  # [SOME, HALF]
    LOR: gl.constexpr = gl.SliceLayout(1, LO)
    LW: gl.constexpr = swap_columns(gl.zeros([SOME, HALF], gl.float32, LO), SOME).type.layout
    offs_p = gl.arange(0, PARTS, gl.SliceLayout(1, LS))
    offs_r = gl.arange(0, SOME, gl.SliceLayout(0, LS))
    offs_l = gl.arange(0, SOME, LR)
    offs_o = gl.arange(0, SOME, gl.SliceLayout(1, LW))
    col = WG * HALF + gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(1, L3)))
    col_o = WG * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LW))
    for r in range(first, end, SOME):
        row = r + offs_o
        ok_o = row < end
        query = gl.load(p_item + I_QUERIES + row // S.GROUP, mask=ok_o, other=0)
        most = gl.full([SOME], LOWEST, gl.float32, LR)
        total = gl.zeros([SOME], gl.float32, LR)
        acc = gl.zeros([SOME, HALF], gl.float32, LO)
        for p in range(0, parts, PARTS):
            i = ((partial + p + offs_p).to(gl.int64) * ROWS)[:, None] + (r + offs_r)[None, :]
            ok = (p + offs_p < parts)[:, None] & (r + offs_r < end)[None, :]
            # past the first-level cache: other CTAs wrote these
            lse = gl.load(
                partial_state_ptr + i * 2, mask=ok, other=float("-inf"), cache_modifier=".cg"
            )
            scale = gl.load(
                scales_of(partial_state_ptr, i, WG), mask=ok, other=0.0, cache_modifier=".cg"
            ).to(gl.float32)
            x = gl.load(
                partial_out_ptr + (i * VALUE_DIM)[:, :, None] + col[None, None, :],
                mask=ok[:, :, None],
                other=0.0,
                cache_modifier=".cg",
            )
            most, total, acc = add_parts(most, total, acc, lse, scale, x, LOR)
        # an LSE that is no number is in no maximum, but in its weight, and so in the sum
        inv = gl.convert_layout(gl.where(total > 0, 1.0 / total, 0.0), LOR)
        p_out = out_ptr + query.to(gl.int64) * stride_out + row % S.GROUP * VALUE_DIM
        result = swap_columns((acc * inv[:, None]).to(out_ptr.dtype.element_ty), SOME)
        gl.store(p_out[:, None] + col_o[None, :], result, mask=ok_o[:, None])
        if S.HAS_LSE and WG == 0:
            row_l = r + offs_l
            ok_l = row_l < end
            query_l = gl.load(p_item + I_QUERIES + row_l // S.GROUP, mask=ok_l, other=0)
            p_lse = lse_ptr + query_l * S.GROUP + row_l % S.GROUP
            gl.store(p_lse, most + gl.log2(total), mask=ok_l)
