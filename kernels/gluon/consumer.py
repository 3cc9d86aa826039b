"""The two consumer warpgroups: products, softmax and results of 64 rows each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .block_pairs import attend_pairs
from .blocks import attend_blocks, pass_on
from .merge_parts import merge_share
from .results import store_results
from .shape import (
    BLOCK,
    H_NUM_ITEMS,
    H_STEPS,
    HALF_ROWS,
    HEADER_WORDS,
    I_BLOCKS,
    I_FLAGS,
    I_GROWING,
    I_PARTS,
    I_ROWS,
    advance,
    blocks_of,
    stages_of,
    ticket_of,
)


@gluon.jit
def consume(
    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, words_ptr, stride_out,
    sm_scale, logits_soft_cap, rings, S, WG: gl.constexpr,
):  # fmt: skip
    """Every item of this CTA that warpgroup WG has rows of, then its share of what to merge."""
    LEAN: gl.constexpr = S.HEAD_DIM > 128
    # a layout in which each warp has all of it
    TL: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16]))
    num_tickets = gl.load(words_ptr + H_NUM_ITEMS) * S.HEADS
    steps = gl.load(words_ptr + H_STEPS)
    turns = 0
    stage = 0
    phase = 0
    q_phase = 0
    split_turns = 0
    ticket = ticket_of(0)
    while ticket < num_tickets:
        head = ticket % S.HEADS
        p_item = words_ptr + HEADER_WORDS + ticket // S.HEADS * S.ITEM
        rows = gl.load(p_item + I_ROWS)
        planned = gl.load(p_item + I_BLOCKS)
        num_blocks = blocks_of(planned, gl.load(p_item + I_GROWING), steps)
        p_flags = words_ptr + gl.load(p_item + I_FLAGS)
        wide = rows > HALF_ROWS
        # tiles of one warpgroup go to both in turn
        if wide | ((turns & 1) == WG):
            base = gl.where(wide, WG * HALF_ROWS, 0)
            if S.PAIRS:
                acc, b_max, b_sum, stage, phase = attend_pairs(
                    rings, p_flags, planned, num_blocks, base, stage, phase, q_phase, sm_scale,
                    logits_soft_cap, S, WG,
                )  # fmt: skip
            else:
                acc, b_max, b_sum, stage, phase = attend_blocks(
                    rings, p_flags, planned, num_blocks, base, stage, phase, q_phase, sm_scale,
                    logits_soft_cap, S, WG,
                )  # fmt: skip
            q_phase ^= 1
            split_turns += store_results(
                acc, b_max, b_sum, base, rows, head, p_item, out_ptr, lse_ptr, partial_out_ptr,
                partial_state_ptr, counters_ptr, stride_out, S,
            )  # fmt: skip
        else:
            for _ in range(stages_of(num_blocks, S)):
                pass_on(rings, stage, phase, LEAN)
                stage, phase = advance(stage, phase, S.STAGES)
        if S.DYNAMIC:
            slot = turns & 1
            mbarrier.wait(rings.t_full.index(slot), (turns >> 1) & 1)
            ticket = gl.max(rings.tickets.index(slot).load(TL), 0)
            mbarrier.arrive(rings.t_free.index(slot), count=1)
            turns += 1
        else:
            turns += 1
            ticket = ticket_of(turns)

    # Only now, when every part of this CTA is counted: all CTAs are resident, so each part that
    # another waits for is either counted or on its way.
    while (split_turns > 0) & (turns > 0):
        turns -= 1
        ticket = ticket_of(turns)
        head = ticket % S.HEADS
        p_item = words_ptr + HEADER_WORDS + ticket // S.HEADS * S.ITEM
        rows = gl.load(p_item + I_ROWS)
        parts = gl.load(p_item + I_PARTS)
        if (parts > 1) & ((rows > HALF_ROWS) | ((turns & 1) == WG)):
            merge_share(
                out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, p_item, head,
                rows, parts, stride_out, S, WG,
            )  # fmt: skip
            split_turns -= 1
