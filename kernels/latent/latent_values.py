"""Warpgroup 1: value columns 256 to 511, by the probabilities that the other one leaves."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..hopper.cleaning import is_tainted, must_run_again, show, taint
from ..hopper.shape import (
    H_NUM_ITEMS,
    H_STEPS,
    HEADER_WORDS,
    I_BLOCKS,
    I_GROWING,
    I_ROWS,
    advance,
    blocks_of,
    release,
    ticket_of,
)
from .latent_merge import count_half, merge_shares
from .latent_results import store_half, to_store
from .latent_shape import HALF, ROWS, STAGES


@gluon.jit
def add_right_half(
    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, words_ptr, stride_out, r, S,
):  # fmt: skip
    """Run the right half of the results of every item of this CTA, then merge it of its share of
    split tiles."""
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OR: gl.constexpr = gl.SliceLayout(1, OL)
    num_tickets = gl.load(words_ptr + H_NUM_ITEMS)
    steps = gl.load(words_ptr + H_STEPS)
    tainted = taint(gl.zeros([ROWS, HALF], gl.float32, OL))
    runs = 0
    turns = 0
    counted = 0
    split_turns = 0
    stage = 0
    phase = 0
    p_phase = 0
    ticket = ticket_of(0)
    while ticket < num_tickets:
        p_item = words_ptr + HEADER_WORDS + ticket * S.ITEM
        rows = gl.load(p_item + I_ROWS)
        planned = gl.load(p_item + I_BLOCKS)
        num_blocks = blocks_of(planned, gl.load(p_item + I_GROWING), steps)
        acc = gl.zeros([ROWS, HALF], gl.float32, OL)
        for _ in range(num_blocks):
            mbarrier.wait(r.p_full.index(0), p_phase)
            p_phase ^= 1
            acc = acc * r.alpha.load(OR)[:, None]
            mbarrier.wait(r.full1.index(stage), phase)
            acc = warpgroup_mma(r.p, r.c1.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            release(r.p_free.index(0))
            release(r.free1.index(stage))
            stage, phase = advance(stage, phase, STAGES)
        mbarrier.wait(r.p_full.index(0), p_phase)
        p_phase ^= 1
        acc = acc * r.alpha.load(OR)[:, None]
        release(r.p_free.index(0))
        tainted += taint(acc)
        rows = to_store(rows, runs, turns, counted, p_item)
        parts = store_half(
            acc, rows, p_item, out_ptr, partial_out_ptr, partial_state_ptr, stride_out, S, 1
        )
        if parts > 1:
            show(tainted, r, 1)
            if (runs == 0) & (is_tainted(r, 1, 4) == 0):
                counted = turns + 1
            if (turns < counted) == (runs == 0):
                count_half(p_item, counters_ptr, 1)
                split_turns += 1
        turns += 1
        ticket = ticket_of(turns)
        if (ticket >= num_tickets) & (runs == 0):
            show(tainted, r, 1)
            mbarrier.arrive(r.shown.index(0), count=1)
            runs = 1
            if must_run_again(r, 4) != 0:
                turns = 0
                ticket = ticket_of(0)
    merge_shares(
        turns, split_turns, out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr,
        words_ptr, stride_out, S, 1,
    )  # fmt: skip
