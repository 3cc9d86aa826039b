"""Warpgroup 0: scores of all 576 elements, softmax, and value columns 0 to 255."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..hopper.cleaning import is_tainted, must_run_again, show, taint
from ..hopper.shape import (
    BLOCK,
    FLAG_BITS,
    FLAGS_PER_WORD,
    H_NUM_ITEMS,
    H_STEPS,
    HEADER_WORDS,
    I_BLOCKS,
    I_FLAGS,
    I_GROWING,
    I_ROWS,
    LOG2_E,
    LOWEST,
    MASKED,
    blocks_of,
    group_barrier,
    release,
    ticket_of,
)
from ..hopper.softmax import by_quads, grow, keep_visible, probabilities, shrink, thread_sum
from .latent_merge import count_half, merge_shares
from .latent_results import here, store_half, store_lse, to_store
from .latent_shape import HALF, ROWS, STAGES

GROWN = gl.constexpr(0x11111111)  # flags of FLAGS_PER_WORD blocks that are masked


@gluon.jit
def score(
    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, words_ptr, stride_out,
    sm_scale, r, S,
):  # fmt: skip
    """Run every item of this CTA: its scores, and the left half of its results; then merge that
    half of its share of split tiles."""
    DTYPE: gl.constexpr = r.q0.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    scale = sm_scale * LOG2_E
    z = gl.zeros([ROWS, BLOCK], gl.float32, SL)
    tainted = taint(gl.zeros([ROWS, HALF], gl.float32, OL))
    runs = 0
    turns = 0
    counted = 0  # turns of the first run whose parts are counted
    split_turns = 0
    items = 0  # of both runs, and their blocks: stages and phases follow from these
    blocks = 0
    ticket = ticket_of(0)
    while ticket < gl.load(words_ptr + H_NUM_ITEMS):
        p_item = words_ptr + HEADER_WORDS + ticket * S.ITEM
        rows = gl.load(p_item + I_ROWS)
        planned = gl.load(p_item + I_BLOCKS)
        steps = gl.load(words_ptr + H_STEPS)
        num_blocks = blocks_of(planned, gl.load(p_item + I_GROWING), steps)
        first_flags = gl.load(p_item + I_FLAGS)
        b_sum = thread_sum(by_quads(z))
        b_max = b_sum + LOWEST
        acc = gl.zeros([ROWS, HALF], gl.float32, OL)
        mbarrier.wait(r.q_full.index(0), items & 1)
        for i in range(num_blocks):
            # not known to be the same in each block: the addresses of queries for 36 products would
            # be kept in registers
            q = here(num_blocks - i)
            stage = blocks % STAGES
            phase = blocks // STAGES & 1
            c0 = r.c0.index(stage)
            # arrives while scores are made; blocks behind the planned ones have grown
            word = gl.load(
                words_ptr + first_flags + i // FLAGS_PER_WORD, mask=i < planned, other=GROWN
            )
            mbarrier.wait(r.full0.index(stage), phase)
            kr = r.kr.index(stage).permute((1, 0))
            s = warpgroup_mma(r.qr.index(q), kr, z, use_acc=False, is_async=True)
            s = warpgroup_mma(r.q0.index(q), c0.permute((1, 0)), s, is_async=True)
            mbarrier.wait(r.full1.index(stage), phase)
            s = warpgroup_mma(r.q1.index(q), r.c1.index(stage).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            if (word >> (i % FLAGS_PER_WORD * FLAG_BITS) & MASKED) != 0:
                key = r.keys.index(stage).load(gl.SliceLayout(0, SL))
                row = gl.arange(0, ROWS, gl.SliceLayout(1, SL)) + here(rows)
                s = keep_visible(s, key, row, S.BIT_KEYS, S.GROUP)
            b_max, alpha = grow(s, b_max, scale, BY_ROW=False)
            acc = shrink(acc, alpha)
            s, part = probabilities(s, b_max, scale)
            b_sum = b_sum * alpha + part
            p = s.to(DTYPE)
            mbarrier.wait(r.p_free.index(0), blocks + items + 1 & 1)
            r.p.store(p)
            r.alpha.store(gl.max(alpha, 1))
            fence_async_shared()
            group_barrier()  # what all warps wrote before one thread says that it is there
            mbarrier.arrive(r.p_full.index(0), count=1)
            acc = warpgroup_mma(gl.convert_layout(p, PL), c0, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            release(r.free0.index(stage))
            blocks += 1
        mbarrier.arrive(r.q_free.index(0), count=1)

        total = gl.sum(b_sum, 1)
        inv = gl.where(total > 0, 1.0 / total, 0.0)  # rows without a token add nothing
        rows = to_store(rows, runs, turns, counted, p_item)
        # before the right half may count it
        store_lse(gl.max(b_max, 1) + gl.log2(total), rows, p_item, lse_ptr, partial_state_ptr, S)
        mbarrier.wait(r.p_free.index(0), blocks + items + 1 & 1)
        items += 1
        r.alpha.store(inv)
        group_barrier()
        mbarrier.arrive(r.p_full.index(0), count=1)
        acc = acc * gl.convert_layout(inv, gl.SliceLayout(1, OL))[:, None]
        tainted += taint(acc)
        parts = store_half(
            acc, rows, p_item, out_ptr, partial_out_ptr, partial_state_ptr, stride_out, S, 0
        )
        if parts > 1:
            show(tainted, r, 0)
            # a half of a part is counted once: by the first run while all is finite, or the second
            if (runs == 0) & (is_tainted(r, 0, 4) == 0):
                counted = turns + 1
            if (turns < counted) == (runs == 0):
                count_half(p_item, counters_ptr, 0)
                split_turns += 1
        turns += 1
        ticket = ticket_of(turns)
        if (ticket >= gl.load(words_ptr + H_NUM_ITEMS)) & (runs == 0):
            show(tainted, r, 0)
            mbarrier.arrive(r.shown.index(0), count=1)
            runs = 1
            if must_run_again(r, 4) != 0:
                turns = 0
                ticket = ticket_of(0)
    merge_shares(
        turns, split_turns, out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr,
        words_ptr, stride_out, S, 0,
    )  # fmt: skip
