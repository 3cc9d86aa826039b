"""Tiles of requests in plain Triton: one launch per layer, whatever the tree, from sm_80 on.

Several CTAs an SM take tickets (item, KV head) off one queue, heaviest items first. An item is a
tile of up to TILE_ROWS rows over its list of blocks; K and V rows are gathered by cp.async in a
loop that Triton pipelines. The CTA that ends the last part of a split tile merges the tile, and the
one that ends the last item of a query that is in several tiles merges the query: partial results in
their order, so that nobody waits for anybody and results are the same bits from run to run.

INVARIANT: over aligned plans each row's results are the same bits whatever else its tile holds. Its
rescaling is always its own; partial results are in float32, all tiles have one loop, whose products
and sums are of one shape, and a NaN elsewhere changes no row's arithmetic.

The words are those of kernels/words.py. Whom a column is for is in its key alone: FLAGS are
not read.
"""

import triton
import triton.language as tl

from sgl_prefix_attn.kernels import words as W

from .block_loop import Shape, attend
from .row_alone import attend_alone
from .tile_results import LEFT, TICKETS, any_not_finite, count_part, store_results

HEADER_WORDS, I_ROWS = tl.constexpr(W.HEADER_WORDS), tl.constexpr(W.I_ROWS)
H_NUM_ITEMS = tl.constexpr(W.H_NUM_ITEMS)
# rows up to which an item has a loop of its own, unless INVARIANT
FEW = tl.constexpr(16)


@triton.jit
def _run(
    p_item, i_item, head, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partial_out_ptr,
    partial_state_ptr, words_ptr, slots_ptr, keys_ptr, sinks_ptr, stride_q, stride_k, stride_v,
    stride_out, sm_scale, cap, v_scale, S, BLOCK_M: tl.constexpr, CLEAN: tl.constexpr = False,
):  # fmt: skip
    """An item of up to BLOCK_M rows; returns whether results are not finite, and so not stored
    unless they are CLEAN."""
    acc0, acc1, acc2, acc3, b_max, b_sum = attend(
        p_item, i_item, head, q_ptr, k_ptr, v_ptr, words_ptr, slots_ptr, keys_ptr, stride_q,
        stride_k, stride_v, sm_scale, cap, v_scale, S, BLOCK_M, CLEAN,
    )  # fmt: skip
    ok = tl.arange(0, BLOCK_M) < tl.load(p_item + I_ROWS)
    broken = any_not_finite(acc0, acc1, acc2, acc3, ok, S)
    if CLEAN or not broken:
        store_results(
            acc0, acc1, acc2, acc3, b_max, b_sum, p_item, head, 0, out_ptr, lse_ptr,
            partial_out_ptr, partial_state_ptr, sinks_ptr, stride_out, S, BLOCK_M, S.CHUNK,
        )  # fmt: skip
    return broken


@triton.jit
def row_tile_portable_kernel(
    q_ptr,  # [rows, Hq, D]
    k_ptr,  # [slots, Hkv, D], as q or float8_e4m3fn
    v_ptr,  # [slots, Hkv, D], as k
    out_ptr,  # [rows, Hq, D]
    lse_ptr,  # float32 [rows, Hq], base 2, written where HAS_LSE
    # float16, float32 if INVARIANT [tiles, Hkv, TILE_ROWS, D], then [places, Hkv, GROUP, D]
    partial_out_ptr,
    # float32, as partial_out: LSE in base 2 and scale of each row, if INVARIANT maximum and sum
    partial_state_ptr,
    counters_ptr,  # int32 [2 + places * Hkv], 0 before and after
    words_ptr,  # int32 [words]
    slots_ptr,  # int32 [blocks, BLOCK]
    keys_ptr,  # int32 [blocks, BLOCK]
    sinks_ptr,  # [Hq], None where not HAS_SINK
    stride_q,  # elements between rows of q
    stride_k,  # elements between slots
    stride_v,
    stride_out,
    sm_scale,  # times the scale of keys of float8_e4m3fn
    logits_soft_cap,
    v_scale,  # of values of float8_e4m3fn
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
    TILE_ROWS: tl.constexpr,  # the plan's
    BLOCK_N: tl.constexpr,  # columns at once, a divisor of BLOCK
    STAGES: tl.constexpr,
    ITEM: tl.constexpr,  # item_words of the plan's tiles
    BIT_KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    CHUNK: tl.constexpr,  # columns of one tensor of results: BLOCK_D, a half or a quarter of it
    INVARIANT: tl.constexpr,  # a row's bits do not depend on other rows, over aligned plans
):
    """Run all items. Grid (any,): as many CTAs as fit the GPU."""
    S = Shape(
        HEADS, GROUP, HEAD_DIM, BLOCK_D, TILE_ROWS, BLOCK_N, STAGES, BIT_KEYS, HAS_CAP, HAS_LSE,
        HAS_SINK, CHUNK, INVARIANT,
    )  # fmt: skip
    num_tickets = tl.load(words_ptr + H_NUM_ITEMS) * HEADS
    ticket = tl.program_id(0)
    while ticket < num_tickets:
        i_item = ticket // HEADS
        head = ticket % HEADS
        p_item = words_ptr + HEADER_WORDS + i_item * ITEM
        rows = tl.load(p_item + I_ROWS)
        if not INVARIANT and rows <= FEW:
            broken = _run(
                p_item, i_item, head, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partial_out_ptr,
                partial_state_ptr, words_ptr, slots_ptr, keys_ptr, sinks_ptr, stride_q, stride_k,
                stride_v, stride_out, sm_scale, logits_soft_cap, v_scale, S, FEW,
            )  # fmt: skip
        else:
            broken = _run(
                p_item, i_item, head, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partial_out_ptr,
                partial_state_ptr, words_ptr, slots_ptr, keys_ptr, sinks_ptr, stride_q, stride_k,
                stride_v, stride_out, sm_scale, logits_soft_cap, v_scale, S, TILE_ROWS,
            )  # fmt: skip
        # again where anything is not finite, so that it reaches only the rows that see it
        if INVARIANT and broken:
            _run(
                p_item, i_item, head, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partial_out_ptr,
                partial_state_ptr, words_ptr, slots_ptr, keys_ptr, sinks_ptr, stride_q, stride_k,
                stride_v, stride_out, sm_scale, logits_soft_cap, v_scale, S, TILE_ROWS, CLEAN=True,
            )  # fmt: skip
        elif broken:
            for row in range(0, rows):
                acc, b_max, b_sum = attend_alone(
                    p_item, i_item, head, row, q_ptr, k_ptr, v_ptr, words_ptr, slots_ptr, keys_ptr,
                    stride_q, stride_k, stride_v, sm_scale, logits_soft_cap, v_scale, S,
                )  # fmt: skip
                store_results(
                    acc, acc, acc, acc, b_max, b_sum, p_item, head, row, out_ptr, lse_ptr,
                    partial_out_ptr, partial_state_ptr, sinks_ptr, stride_out, S, 1, BLOCK_D,
                )  # fmt: skip
        # taken at an item's end, so that the queue balances
        ticket = tl.atomic_add(counters_ptr + TICKETS, 1, sem="relaxed") + tl.num_programs(0)
        count_part(
            p_item, head, out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr,
            words_ptr, sinks_ptr, stride_out, S,
        )  # fmt: skip
    # the last CTA to leave makes the queue new for the next launch
    if tl.atomic_add(counters_ptr + LEFT, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counters_ptr + TICKETS, 0)
        tl.store(counters_ptr + LEFT, 0)
