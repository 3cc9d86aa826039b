"""What a warpgroup makes of its half of a tile's finished columns: outputs, or a part of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..hopper.shape import I_PART, I_PARTIAL, I_PARTS, I_QUERIES
from .latent_shape import HALF, ROWS, VALUE_DIM


@gluon.jit
def here(rows):
    """Return 0, as the compiler does not know: what is added to it is computed where it is used,
    and takes no registers from the loop over blocks."""
    return gl.minimum(rows, 0)


@gluon.jit
def to_store(rows, runs, turns, counted, p_item):
    """Return how many of an item's rows are stored: none of a half that the first run has counted,
    which other CTAs may be merging. Where the other half alone found what is not finite, cleaned
    rows give this one other values."""
    kept = (runs == 1) & (turns < counted) & (gl.load(p_item + I_PARTS) > 1)
    return gl.where(kept, 0, rows)


@gluon.jit
def store_half(
    acc, rows, p_item, out_ptr, partial_out_ptr, partial_state_ptr, stride_out, S, WG: gl.constexpr
):
    """Store columns of half WG of an item's results acc [64, 256], normalised. Returns of how many
    parts they are one."""
    OL: gl.constexpr = acc.type.layout
    # of swapped columns, where a thread has them
    PL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, HALF],
    )
    row = gl.arange(0, ROWS, gl.SliceLayout(1, OL)) + here(rows)
    col = WG * HALF + gl.arange(0, HALF, gl.SliceLayout(0, OL))
    ok = row < rows
    parts = gl.load(p_item + I_PARTS)
    if parts == 1:
        query = gl.load(p_item + I_QUERIES + row // S.GROUP, mask=ok, other=0)
        p_out = out_ptr + query.to(gl.int64) * stride_out + row % S.GROUP * VALUE_DIM
        gl.store(p_out[:, None] + col[None, :], acc.to(out_ptr.dtype.element_ty), mask=ok[:, None])
    else:
        # half-precision partial rows are scaled to about [-1, 1]: 11 bits of the largest
        scale = gl.maximum(gl.max(gl.abs(acc), 1), 1e-30).to(gl.bfloat16)
        scaled = swap_columns((acc * (1.0 / scale.to(gl.float32))[:, None]).to(gl.float16), ROWS)
        scaled = gl.convert_layout(scaled, PL)
        first = (gl.load(p_item + I_PARTIAL) + gl.load(p_item + I_PART)).to(gl.int64) * ROWS
        gl.store(scales_of(partial_state_ptr, first + row, WG), scale, mask=ok)
        row_p = gl.arange(0, ROWS, gl.SliceLayout(1, PL)) + here(rows)
        col_p = WG * HALF + gl.arange(0, HALF, gl.SliceLayout(0, PL))
        p_partial = partial_out_ptr + (first + row_p) * VALUE_DIM
        gl.store(p_partial[:, None] + col_p[None, :], scaled, mask=(row_p < rows)[:, None])
    return parts


@gluon.jit
def swap_columns(x, COUNT: gl.constexpr):
    """Return rows [COUNT, 256] as partial results have them, and such rows as they were.

    A thread has pairs of columns 8 apart, of what products leave. Four of them stand together in
    memory, so that it stores 16 bytes: 4 would fill half a sector."""
    pairs = gl.permute(gl.reshape(x, [COUNT, HALF // 32, 4, 4, 2]), [0, 1, 3, 2, 4])
    return gl.reshape(pairs, [COUNT, HALF])


@gluon.jit
def store_lse(lse, rows, p_item, lse_ptr, partial_state_ptr, S):
    """Store the base-2 LSE [64] of an item's rows, where it is asked for, or that of a part."""
    row = gl.arange(0, ROWS, lse.type.layout) + here(rows)
    ok = row < rows
    if gl.load(p_item + I_PARTS) > 1:
        first = (gl.load(p_item + I_PARTIAL) + gl.load(p_item + I_PART)).to(gl.int64) * ROWS
        gl.store(partial_state_ptr + (first + row) * 2, lse, mask=ok)
    elif S.HAS_LSE:
        query = gl.load(p_item + I_QUERIES + row // S.GROUP, mask=ok, other=0)
        gl.store(lse_ptr + query * S.GROUP + row % S.GROUP, lse, mask=ok)


@gluon.jit
def scales_of(partial_state_ptr, row, WG: gl.constexpr):
    """Return the places of the bfloat16 scales of half WG of partial rows: two share the word
    behind the LSE."""
    return partial_state_ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True) + row * 4 + 2 + WG
