"""Merging partial results in the portable kernel: of rows, and by query where a query's results are
in several tiles."""

import triton
import triton.language as tl

from sgl_prefix_attn.kernels import words as W

from .block_loop import LOG2_E, LOWEST

I_ROWS, I_QUERIES = tl.constexpr(W.I_ROWS), tl.constexpr(W.I_QUERIES)
H_MERGES, MERGE_WORDS = tl.constexpr(W.H_MERGES), tl.constexpr(W.MERGE_WORDS)
M_PLACES, M_COUNT = tl.constexpr(W.M_PLACES), tl.constexpr(W.M_COUNT)
# rows that are merged at once
ROWS = tl.constexpr(16)


@triton.jit
def place_row(place, i_head, head, HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Where in the partial results a place has head i_head of a KV head's group."""
    return (place.to(tl.int64) * HEADS + head) * GROUP + i_head


@triton.jit
def add_partial(
    acc, row_max, total, i_row, ok, partial_out_ptr, partial_state_ptr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, INVARIANT: tl.constexpr = False,
):  # fmt: skip
    """Results [R, D], maxima and sums [R], base 2, with the partial rows i_row [R] that are ok."""
    offs_d = tl.arange(0, BLOCK_D)
    # past the first-level cache: other CTAs wrote these
    p_state = partial_state_ptr + i_row * 2
    lse = tl.load(p_state, mask=ok, other=float("-inf"), cache_modifier=".cg")
    top = tl.load(p_state + 1, mask=ok, other=0.0, cache_modifier=".cg")
    b_out = tl.load(
        partial_out_ptr + i_row[:, None] * HEAD_DIM + offs_d[None, :],
        mask=ok[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    new_max = tl.maximum(row_max, lse)
    weight = tl.exp2(lse - new_max)
    old = tl.exp2(row_max - new_max)
    if INVARIANT:  # a maximum and a sum; fused in one way, wherever a part is in an unrolled loop
        acc = tl.fma(b_out, weight[:, None], acc * old[:, None])
        return acc, new_max, tl.fma(top, weight, total * old)
    acc = acc * old[:, None] + b_out.to(tl.float32) * (weight * top)[:, None]
    return acc, new_max, total * old + weight


@triton.jit
def with_sink(inv, row_max, total, sinks_ptr, i_head, ok, HAS_SINK: tl.constexpr):
    """Return what a whole row's results are multiplied by, its maximum and its sum, all [R], with
    the sinks of heads i_head [R]: one more logit, in base 2, that has no value."""
    if HAS_SINK:
        sink = tl.load(sinks_ptr + i_head, mask=ok, other=0.0).to(tl.float32) * LOG2_E
        new_max = tl.maximum(row_max, sink)
        shrink = tl.exp2(row_max - new_max)
        total = total * shrink + tl.exp2(sink - new_max)
        inv = tl.where(total == 0, 0.0, shrink / total)
        row_max = new_max
    return inv, row_max, total


@triton.jit
def store_merged(
    acc, row_max, total, query, i_head, ok, out_ptr, lse_ptr, sinks_ptr, stride_out,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LSE: tl.constexpr,
    HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Merged rows [R, D] to heads i_head [R] of the queries [R]."""
    offs_d = tl.arange(0, BLOCK_D)
    inv = tl.where(total == 0, 0.0, 1.0 / total)
    inv, row_max, total = with_sink(inv, row_max, total, sinks_ptr, i_head, ok, HAS_SINK)
    tl.store(
        out_ptr + (query * stride_out + i_head * HEAD_DIM)[:, None] + offs_d[None, :],
        (acc * inv[:, None]).to(out_ptr.dtype.element_ty),
        mask=ok[:, None] & (offs_d < HEAD_DIM)[None, :],
    )
    if HAS_LSE:
        tl.store(lse_ptr + query * NUM_HEADS + i_head, row_max + tl.log2(total), mask=ok)


# not triton.next_power_of_2, which SGLang replaces with one of its own on machines without a GPU
@triton.constexpr_function
def _power_of_2_from(n):
    """Return the least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@triton.jit
def count_queries(
    p_item, head, out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, words_ptr,
    sinks_ptr, stride_out, S,
):  # fmt: skip
    """Count an item for each of its queries, at once, and merge those that it is the last item of,
    each in the order of its places, a few queries' rows at a time."""
    MOST: tl.constexpr = _power_of_2_from(S.TILE_ROWS // S.GROUP)
    # heads of a query that are merged at once, and queries
    FEW_HEADS: tl.constexpr = ROWS if S.GROUP >= ROWS else _power_of_2_from(S.GROUP)
    FEW: tl.constexpr = ROWS // FEW_HEADS
    queries = tl.load(p_item + I_ROWS) // S.GROUP
    p_merges = words_ptr + tl.load(words_ptr + H_MERGES)
    i_query = tl.arange(0, MOST)
    there = i_query < queries
    query = tl.load(p_item + I_QUERIES + i_query, mask=there, other=0)
    first = tl.load(p_merges + query * MERGE_WORDS + M_PLACES, mask=there, other=0)
    count = tl.load(p_merges + query * MERGE_WORDS + M_COUNT, mask=there, other=0)
    p_counter = counters_ptr + tl.load(words_ptr + first, mask=there, other=0) * S.HEADS + head
    tl.debug_barrier()  # the stores of all warps before the count
    last = there & (tl.atomic_add(p_counter, 1, mask=there, sem="acq_rel") == count - 1)
    tl.store(p_counter, 0, mask=last)  # for the next launch
    tl.debug_barrier()  # the loads of all warps behind the counts
    lane = tl.arange(0, ROWS)
    for q in range(0, queries, FEW):
        # [MOST, ROWS]: of each lane's query, by which the others' are left out
        mine = i_query[:, None] == (q + lane // FEW_HEADS)[None, :]
        places = tl.sum(tl.where(mine & last[:, None], count[:, None], 0), 0)
        most = tl.max(places, 0)
        if most > 0:
            p_places = words_ptr + tl.sum(tl.where(mine, first[:, None], 0), 0)
            row = tl.sum(tl.where(mine, query[:, None], 0), 0).to(tl.int64)
            for h in range(0, S.GROUP, FEW_HEADS):
                i_head = h + lane % FEW_HEADS
                ok = (places > 0) & (i_head < S.GROUP)
                row_max = tl.full([ROWS], LOWEST, tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros([ROWS, S.BLOCK_D], tl.float32)
                for i in tl.range(0, most, loop_unroll_factor=2):
                    one = ok & (i < places)
                    place = tl.load(p_places + i, mask=one, other=0)
                    i_row = place_row(place, i_head, head, S.HEADS, S.GROUP)
                    acc, row_max, total = add_partial(
                        acc, row_max, total, i_row, one, partial_out_ptr, partial_state_ptr,
                        S.HEAD_DIM, S.BLOCK_D,
                    )  # fmt: skip
                store_merged(
                    acc, row_max, total, row, head * S.GROUP + i_head, ok, out_ptr, lse_ptr,
                    sinks_ptr, stride_out, S.HEADS * S.GROUP, S.HEAD_DIM, S.BLOCK_D, S.HAS_LSE,
                    S.HAS_SINK,
                )  # fmt: skip
