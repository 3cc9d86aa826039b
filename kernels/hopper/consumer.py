"""The two consumer warpgroups: products, softmax and results of 64 rows each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .cleaning import is_tainted, must_run_again, show, taint
from .e4m3_blocks import terms_in_place, two_terms
from .merge_parts import merge_share
from .results import count_part, store_results
from .shape import (
    BLOCK,
    FLAG_BITS,
    FLAGS_OF_BLOCK,
    FLAGS_PER_WORD,
    FOR_WARPGROUP,
    GROWTH_FLAGS,
    H_NUM_ITEMS,
    H_STEPS,
    HALF_ROWS,
    HEADER_WORDS,
    I_BLOCKS,
    I_FLAGS,
    I_GROWING,
    I_PARTS,
    I_ROWS,
    LOG2_E,
    LOWEST,
    MASKED,
    advance,
    blocks_of,
    group_barrier,
    release,
    ticket_of,
    values_of,
)
from .softmax import (
    by_quads,
    grow,
    keep_visible,
    of_quads,
    probabilities,
    product,
    shrink,
    soft_cap,
    thread_sum,
    to_quads,
)


@gluon.jit
def pass_on(rings, stage, phase, S):
    """Pass on a block without columns for this warpgroup's rows."""
    if S.NARROW:
        mbarrier.wait(rings.k_full.index(stage), phase)
        release(rings.k_free.index(stage))
    elif S.HEAD_DIM > 128:
        mbarrier.wait(rings.k_full.index(stage), phase)
        mbarrier.arrive(rings.k_free.index(stage), count=1)
    mbarrier.wait(rings.full.index(stage), phase)
    release(rings.free.index(stage))


@gluon.jit
def begin_values(p, acc, rings, v_stage, v_phase, S):
    """Begin to add p times the values of a block to acc."""
    if S.HEAD_DIM > 128 or S.NARROW:
        mbarrier.wait(rings.full.index(v_stage), v_phase)
    if S.NARROW:
        # before products of what other threads wrote; the producer has no time for it
        fence_async_shared()
    return warpgroup_mma(p, values_of(rings, v_stage, S), acc, is_async=True)


@gluon.jit
def add_values(p, acc, rings, v_stage, v_phase, S):
    """Return acc + p times the values of a block, which may then be overwritten."""
    acc = begin_values(p, acc, rings, v_stage, v_phase, S)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(rings.free.index(v_stage))
    return acc


@gluon.jit
def flags_behind(i, word, next_word, p_flags, planned):
    """Return the flags of block i + 1, and the words that hold the ones behind it: `next_word` was
    asked for FLAGS_PER_WORD blocks ago, so that no block waits for it."""
    i += 1
    new = i % FLAGS_PER_WORD == 0
    word = gl.where(new, next_word, word >> FLAG_BITS)
    if new:
        next_word = gl.load(p_flags + i // FLAGS_PER_WORD + 1)
    return gl.where(i < planned, word & FLAGS_OF_BLOCK, GROWTH_FLAGS), word, next_word


@gluon.jit
def consume(
    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, words_ptr, sinks_ptr,
    stride_out, sm_scale, logits_soft_cap, v_scale, rings, S, WG: gl.constexpr,
):  # fmt: skip
    """Run every item of this CTA that warpgroup WG has rows of, then its share of what to merge."""
    DTYPE: gl.constexpr = rings.v.dtype
    # Results of head dim 256 take 128 registers a thread: queries stay in shared memory then, and
    # a block's products with V end before the scores of the next one begin.
    LEAN: gl.constexpr = S.HEAD_DIM > 128
    DEPTH: gl.constexpr = 32 if S.NARROW else 16  # of a product of scores
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, DEPTH])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.HEAD_DIM, 16])
    QL: gl.constexpr = gl.DotOperandLayout(0, SL, 4 if S.NARROW else 2)
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    SR: gl.constexpr = gl.SliceLayout(1, SL)
    scale = product(sm_scale, LOG2_E) if LEAN else sm_scale * LOG2_E
    ROW_SCALES: gl.constexpr = S.NARROW and not S.HAS_CAP  # rows' units are in their scores' scales
    z = gl.zeros([HALF_ROWS, BLOCK], gl.float32, SL)

    num_tickets = gl.load(words_ptr + H_NUM_ITEMS) * S.HEADS
    steps = gl.load(words_ptr + H_STEPS)
    if not LEAN:
        ZL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        values_of(rings, S.STAGES, S).store(gl.zeros([BLOCK, S.HEAD_DIM], DTYPE, ZL))
        fence_async_shared()
        group_barrier()
    runs = 0
    turns = 0
    stage = 0
    phase = 0
    q_phase = 0
    split_turns = 0
    tainted = taint(gl.zeros([HALF_ROWS, S.HEAD_DIM], gl.float32, OL))
    counted = 0  # turns of the first run whose parts are counted
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
            row_s = base + gl.arange(0, HALF_ROWS, SR)
            b_sum = thread_sum(by_quads(z))
            b_max = b_sum + LOWEST
            acc = gl.zeros([HALF_ROWS, S.HEAD_DIM], gl.float32, OL)
            p = gl.zeros([HALF_ROWS, BLOCK], DTYPE, PL)
            # One code path for all blocks: the first product with values is of zeros by zeros, and
            # releases what nobody waits for.
            v_stage = S.STAGES
            v_phase = 1
            word = gl.load(p_flags)
            next_word = gl.load(p_flags + 1)
            flags = gl.where(planned > 0, word & FLAGS_OF_BLOCK, GROWTH_FLAGS)
            mbarrier.wait(rings.q_full.index(WG), q_phase)
            q_phase ^= 1
            q = rings.q.index(WG)
            if not LEAN:
                # Queries stay in registers: from shared memory they and a block of 64 columns
                # would take all of its bandwidth.
                q = q.load(QL)
                mbarrier.arrive(rings.q_free.index(WG), count=1)
            row_scale = scale
            if S.NARROW:
                if LEAN:
                    q, low, unit = terms_in_place(q, SR)
                else:
                    q, low, unit = two_terms(q, SR)
                if ROW_SCALES:
                    row_scale = of_quads(unit, b_sum) * scale
            for i in range(num_blocks):
                if (flags & (FOR_WARPGROUP << WG)) != 0:
                    mbarrier.wait(rings.k_full.index(stage), phase)
                    k = rings.kv.index(2 * stage + 1).permute((1, 0))
                    s = z
                    if S.NARROW:
                        # The small products first: tensor cores cut off what is 13 bits below the
                        # sum of e4m3 products so far.
                        s = warpgroup_mma(low, k, z, use_acc=False, is_async=True)
                    s = warpgroup_mma(q, k, s, use_acc=S.NARROW, is_async=True)
                    if LEAN:
                        s = warpgroup_mma_wait(0, deps=(s,))
                    else:
                        acc = begin_values(p, acc, rings, v_stage, v_phase, S)
                        s = warpgroup_mma_wait(1, deps=(s,))
                    if S.HAS_CAP:
                        if S.NARROW:
                            s = s * unit[:, None]
                        s = soft_cap(s, sm_scale / logits_soft_cap, logits_soft_cap * LOG2_E)
                        row_scale = 1.0
                    if (flags & MASKED) != 0:
                        key = rings.keys.index(stage).load(gl.SliceLayout(0, SL))
                        s = keep_visible(s, key, row_s, S.BIT_KEYS, S.GROUP)
                    if S.NARROW:
                        release(rings.k_free.index(stage))
                    # here, where it takes its turn with the arithmetic of softmax
                    flags, word, next_word = flags_behind(i, word, next_word, p_flags, planned)
                    b_max, alpha = grow(s, b_max, row_scale, S.INVARIANT)
                    if not LEAN:
                        acc, p, s = warpgroup_mma_wait(0, deps=(acc, p, s))
                        release(rings.free.index(v_stage))
                    acc = shrink(acc, alpha)
                    s, part = probabilities(
                        s, b_max, to_quads(row_scale) if ROW_SCALES else row_scale
                    )
                    b_sum = b_sum * alpha + part
                    p = gl.convert_layout(s.to(DTYPE), PL)
                    v_stage = stage
                    v_phase = phase
                    if LEAN:
                        if not S.NARROW:
                            mbarrier.arrive(rings.k_free.index(stage), count=1)
                        acc = add_values(p, acc, rings, v_stage, v_phase, S)
                else:
                    flags, word, next_word = flags_behind(i, word, next_word, p_flags, planned)
                    pass_on(rings, stage, phase, S)
                stage, phase = advance(stage, phase, S.STAGES)
            if LEAN:
                mbarrier.arrive(rings.q_free.index(WG), count=1)
            else:
                acc = add_values(p, acc, rings, v_stage, v_phase, S)
            if S.NARROW:
                acc = acc * v_scale

            # before the results are stored, where it costs no registers
            tainted += taint(acc)
            parts = store_results(
                acc, b_max, b_sum, base, rows, head, p_item, out_ptr, lse_ptr, partial_out_ptr,
                partial_state_ptr, sinks_ptr, stride_out, S,
            )  # fmt: skip
            if parts > 1:
                show(tainted, rings, WG)
                # a part is counted once: by the first run while all is finite, or the second
                if (runs == 0) & (is_tainted(rings, WG, 4) == 0):
                    counted = turns + 1
                if (turns < counted) == (runs == 0):
                    count_part(base, head, p_item, counters_ptr, S)
                    split_turns += 1
        else:
            for _ in range(num_blocks):
                pass_on(rings, stage, phase, S)
                stage, phase = advance(stage, phase, S.STAGES)
        turns += 1
        ticket = ticket_of(turns)
        if (ticket >= num_tickets) & (runs == 0):
            show(tainted, rings, WG)
            mbarrier.arrive(rings.shown.index(0), count=1)
            runs = 1
            if must_run_again(rings, 4) != 0:
                turns = 0
                ticket = ticket_of(0)

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
                out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, sinks_ptr,
                p_item, head, rows, parts, stride_out, S, WG,
            )  # fmt: skip
            split_turns -= 1
