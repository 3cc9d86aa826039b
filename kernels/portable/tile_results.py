"""What the portable kernel leaves of an item: outputs, or partial results and their merge."""

import triton
import triton.language as tl

from sgl_prefix_attn.kernels import words as W

from .block_loop import LOWEST
from .query_merge import ROWS, add_partial, count_queries, place_row, store_merged, with_sink

I_ROWS, I_QUERIES = tl.constexpr(W.I_ROWS), tl.constexpr(W.I_QUERIES)
I_PART, I_PARTS = tl.constexpr(W.I_PART), tl.constexpr(W.I_PARTS)
I_PARTIAL, I_COUNTER = tl.constexpr(W.I_PARTIAL), tl.constexpr(W.I_COUNTER)
BY_QUERY = tl.constexpr(W.BY_QUERY)
# counters_ptr begins with these two; a tile's counter is COUNTERS + I_COUNTER * HEADS + head
TICKETS, LEFT, COUNTERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def any_not_finite(acc0, acc1, acc2, acc3, ok, S):
    """Tell whether a result [M, D] of the rows that are ok [M] is a NaN or an infinity."""
    total = _sum_of(acc0, ok)
    if S.CHUNK < S.BLOCK_D:
        total += _sum_of(acc1, ok)
    if 2 * S.CHUNK < S.BLOCK_D:
        total += _sum_of(acc2, ok) + _sum_of(acc3, ok)
    return total - total != 0.0


@triton.jit
def _sum_of(acc, ok):
    """A number that is finite where acc [M, CHUNK] is, over the rows that are ok [M]."""
    return tl.sum(tl.where(ok[:, None], acc, 0.0))


@triton.jit
def _store(
    acc, factor, p_row, ok, D: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """acc [M, CHUNK] times factor [M] to columns [D, D + CHUNK) of the rows."""
    offs_d = D + tl.arange(0, CHUNK)
    tl.store(
        p_row[:, None] + offs_d[None, :],
        (acc * factor[:, None]).to(p_row.dtype.element_ty),
        mask=ok[:, None] & (offs_d < HEAD_DIM)[None, :],
    )


@triton.jit
def _store_all(
    acc0, acc1, acc2, acc3, factor, p_row, ok,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    _store(acc0, factor, p_row, ok, 0, HEAD_DIM, CHUNK)
    if CHUNK < BLOCK_D:
        _store(acc1, factor, p_row, ok, CHUNK, HEAD_DIM, CHUNK)
    if 2 * CHUNK < BLOCK_D:
        _store(acc2, factor, p_row, ok, 2 * CHUNK, HEAD_DIM, CHUNK)
        _store(acc3, factor, p_row, ok, 3 * CHUNK, HEAD_DIM, CHUNK)


@triton.jit
def store_results(
    acc0, acc1, acc2, acc3, b_max, b_sum, p_item, head, first_row, out_ptr, lse_ptr,
    partial_out_ptr, partial_state_ptr, sinks_ptr, stride_out, S,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_M rows of an item from first_row on: to the output where the item is its whole
    tile, else to the item's partial tile."""
    row = first_row + tl.arange(0, BLOCK_M)
    ok = row < tl.load(p_item + I_ROWS)
    inv = tl.where(b_sum == 0, 0.0, 1.0 / b_sum)  # rows without a token in this part add nothing
    if tl.load(p_item + I_PARTS) == 1:
        query = tl.load(p_item + I_QUERIES + row // S.GROUP, mask=ok, other=0).to(tl.int64)
        i_head = head * S.GROUP + row % S.GROUP
        p_out = out_ptr + query * stride_out + i_head * S.HEAD_DIM
        factor, row_max, total = with_sink(inv, b_max, b_sum, sinks_ptr, i_head, ok, S.HAS_SINK)
        _store_all(acc0, acc1, acc2, acc3, factor, p_out, ok, S.HEAD_DIM, S.BLOCK_D, CHUNK)
        if S.HAS_LSE:
            p_lse = lse_ptr + query * (S.HEADS * S.GROUP) + i_head
            tl.store(p_lse, row_max + tl.log2(total), mask=ok)
    elif S.INVARIANT:
        # sums as they are: a part that a row has no token in changes nothing of it when it is added
        i_row = _partial_row(p_item, row, head, S)
        p_partial = partial_out_ptr + i_row * S.HEAD_DIM
        one = b_sum * 0.0 + 1.0
        _store_all(acc0, acc1, acc2, acc3, one, p_partial, ok, S.HEAD_DIM, S.BLOCK_D, CHUNK)
        tl.store(partial_state_ptr + i_row * 2, b_max, mask=ok)
        tl.store(partial_state_ptr + i_row * 2 + 1, b_sum, mask=ok)
    else:
        # half-precision partial rows are scaled to [-1, 1]: exact range, 11 bits of the largest
        top = tl.max(tl.abs(acc0), 1)
        if CHUNK < S.BLOCK_D:
            top = tl.maximum(top, tl.max(tl.abs(acc1), 1))
        if 2 * CHUNK < S.BLOCK_D:
            top = tl.maximum(top, tl.max(tl.abs(acc2), 1))
            top = tl.maximum(top, tl.max(tl.abs(acc3), 1))
        top = tl.maximum(top, 1e-30)
        i_row = _partial_row(p_item, row, head, S)
        p_partial = partial_out_ptr + i_row * S.HEAD_DIM
        _store_all(acc0, acc1, acc2, acc3, 1.0 / top, p_partial, ok, S.HEAD_DIM, S.BLOCK_D, CHUNK)
        tl.store(partial_state_ptr + i_row * 2, b_max + tl.log2(b_sum), mask=ok)
        tl.store(partial_state_ptr + i_row * 2 + 1, top * inv, mask=ok)


@triton.jit
def _partial_row(p_item, row, head, S):
    """Where in the partial results an item's rows are: in its partial tile, or at places."""
    first = tl.load(p_item + I_PARTIAL)
    tile = first + tl.load(p_item + I_PART)
    at_places = place_row(first + row // S.GROUP, row % S.GROUP, head, S.HEADS, S.GROUP)
    in_tile = (tile * S.HEADS + head).to(tl.int64) * S.TILE_ROWS + row
    return tl.where(tl.load(p_item + I_PARTS) == BY_QUERY, at_places, in_tile)


@triton.jit
def count_part(
    p_item, head, out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, words_ptr,
    sinks_ptr, stride_out, S,
):  # fmt: skip
    """Count an item whose results are stored; who ends the last one of a tile, or of a query whose
    results are in several tiles, merges them."""
    parts = tl.load(p_item + I_PARTS)
    if parts == BY_QUERY:
        count_queries(
            p_item, head, out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr,
            counters_ptr + COUNTERS, words_ptr, sinks_ptr, stride_out, S,
        )  # fmt: skip
    elif parts > 1:
        p_counter = counters_ptr + COUNTERS + tl.load(p_item + I_COUNTER) * S.HEADS + head
        tl.debug_barrier()  # the stores of all warps before the count
        if tl.atomic_add(p_counter, 1, sem="acq_rel") == parts - 1:
            tl.store(p_counter, 0)  # for the next launch
            _merge(
                p_item, head, parts, out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr,
                sinks_ptr, stride_out, S,
            )  # fmt: skip


@triton.jit
def _merge(
    p_item, head, parts, out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, sinks_ptr,
    stride_out, S,
):  # fmt: skip
    """A tile's output from its parts, in their order, ROWS rows at a time."""
    offs_r = tl.arange(0, ROWS)
    rows = tl.load(p_item + I_ROWS)
    first = tl.load(p_item + I_PARTIAL)
    for r in range(0, rows, ROWS):
        row = r + offs_r
        ok = row < rows
        row_max = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, S.BLOCK_D], tl.float32)
        for part in tl.range(0, parts, loop_unroll_factor=4):
            i_row = ((first + part) * S.HEADS + head).to(tl.int64) * S.TILE_ROWS + row
            acc, row_max, total = add_partial(
                acc, row_max, total, i_row, ok, partial_out_ptr, partial_state_ptr, S.HEAD_DIM,
                S.BLOCK_D, S.INVARIANT,
            )  # fmt: skip
        query = tl.load(p_item + I_QUERIES + row // S.GROUP, mask=ok, other=0).to(tl.int64)
        store_merged(
            acc, row_max, total, query, head * S.GROUP + row % S.GROUP, ok, out_ptr, lse_ptr,
            sinks_ptr, stride_out, S.HEADS * S.GROUP, S.HEAD_DIM, S.BLOCK_D, S.HAS_LSE, S.HAS_SINK,
        )  # fmt: skip
