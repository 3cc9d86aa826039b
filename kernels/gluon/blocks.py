"""A warpgroup's 64 rows over the blocks of one item, one block a turn."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .shape import (
    BLOCK,
    FLAG_BITS,
    FLAGS_OF_BLOCK,
    FLAGS_PER_WORD,
    FOR_WARPGROUP,
    GROWTH_FLAGS,
    HALF_ROWS,
    LOG2_E,
    LOWEST,
    MASKED,
    advance,
)
from .softmax import keep_visible, quad_sum, soft_cap, softmax_step


@gluon.jit
def pass_on(rings, stage, phase, LEAN: gl.constexpr):
    """A stage without columns for this warpgroup's rows."""
    if LEAN:
        mbarrier.wait(rings.k_full.index(stage), phase)
        mbarrier.arrive(rings.k_free.index(stage), count=1)
    mbarrier.wait(rings.full.index(stage), phase)
    mbarrier.arrive(rings.free.index(stage), count=1)


@gluon.jit
def add_values(p, acc, rings, v_at, v_stage):
    """acc + p times the values of a stage, which may then be overwritten."""
    acc = warpgroup_mma(p, rings.kv.index(v_at), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(rings.free.index(v_stage), count=1)
    return acc


@gluon.jit
def flags_behind(i, word, next_word, p_flags, planned):
    """The flags of block i + 1, and the words that hold the ones behind it: `next_word` was asked
    for FLAGS_PER_WORD blocks ago, so that no block waits for it."""
    i += 1
    new = i % FLAGS_PER_WORD == 0
    word = gl.where(new, next_word, word >> FLAG_BITS)
    if new:
        next_word = gl.load(p_flags + i // FLAGS_PER_WORD + 1)
    return gl.where(i < planned, word & FLAGS_OF_BLOCK, GROWTH_FLAGS), word, next_word


@gluon.jit
def attend_blocks(
    rings, p_flags, planned, num_blocks, base, stage, phase, q_phase, sm_scale, logits_soft_cap, S,
    WG: gl.constexpr,
):  # fmt: skip
    """Tile rows [base, base + 64) over the item's blocks: results [64, D], not normalised, maximum
    and sums of softmax_step, and the ring's next stage and phase."""
    DTYPE: gl.constexpr = rings.q.dtype
    # Results of head dim 256 take 128 registers a thread: queries stay in shared memory then, and
    # a block's products with V end before the scores of the next one begin.
    LEAN: gl.constexpr = S.HEAD_DIM > 128
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.HEAD_DIM, 16])
    QL: gl.constexpr = gl.DotOperandLayout(0, SL, 2)
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    SR: gl.constexpr = gl.SliceLayout(1, SL)
    OR: gl.constexpr = gl.SliceLayout(1, OL)
    scale = sm_scale * LOG2_E
    z = gl.zeros([HALF_ROWS, BLOCK], gl.float32, SL)
    row_s = base + gl.arange(0, HALF_ROWS, SR)
    b_max = gl.full([HALF_ROWS], LOWEST, gl.float32, SR)
    b_sum = quad_sum(z)
    acc = gl.zeros([HALF_ROWS, S.HEAD_DIM], gl.float32, OL)
    p = gl.zeros([HALF_ROWS, BLOCK], DTYPE, PL)
    # One code path for all blocks: the first product with values is of zeros, by K.
    v_at = 2 * stage
    v_stage = stage + 0  # a name of its own: an alias is not carried through a loop
    word = gl.load(p_flags)
    next_word = gl.load(p_flags + 1)
    flags = gl.where(planned > 0, word & FLAGS_OF_BLOCK, GROWTH_FLAGS)
    mbarrier.wait(rings.q_full.index(WG), q_phase)
    q = rings.q.index(WG)
    if not LEAN:
        # Queries stay in registers: from shared memory they and a block of 64 columns
        # would take all of its bandwidth.
        q = q.load(QL)
        mbarrier.arrive(rings.q_free.index(WG), count=1)
    for i in range(num_blocks):
        if (flags & (FOR_WARPGROUP << WG)) != 0:
            mbarrier.wait(rings.k_full.index(stage), phase)
            k = rings.kv.index(2 * stage).permute((1, 0))
            s = warpgroup_mma(q, k, z, use_acc=False, is_async=True)
            if LEAN:
                s = warpgroup_mma_wait(0, deps=(s,))
            else:
                acc = warpgroup_mma(p, rings.kv.index(v_at), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s,))
            if S.HAS_CAP:
                s = soft_cap(s, sm_scale / logits_soft_cap, logits_soft_cap * LOG2_E)
                scale = 1.0
            if (flags & MASKED) != 0:
                key = rings.keys.index(stage).load(gl.SliceLayout(0, SL))
                s = keep_visible(s, key, row_s, S.BIT_KEYS, S.GROUP)
            # here, where it takes its turn with the arithmetic of softmax
            flags, word, next_word = flags_behind(i, word, next_word, p_flags, planned)
            s, b_max, b_sum, alpha = softmax_step(s, b_max, b_sum, scale)
            if not LEAN:
                acc, p, s = warpgroup_mma_wait(0, deps=(acc, p, s))
                mbarrier.arrive(rings.free.index(v_stage), count=1, pred=i > 0)
            p = gl.convert_layout(s.to(DTYPE), PL)
            acc = acc * gl.convert_layout(alpha, OR)[:, None]
            v_at = 2 * stage + 1
            v_stage = stage
            if LEAN:
                mbarrier.arrive(rings.k_free.index(stage), count=1)
                mbarrier.wait(rings.full.index(stage), phase)
                acc = add_values(p, acc, rings, v_at, v_stage)
        else:
            flags, word, next_word = flags_behind(i, word, next_word, p_flags, planned)
            pass_on(rings, stage, phase, LEAN)
        stage, phase = advance(stage, phase, S.STAGES)
    if LEAN:
        mbarrier.arrive(rings.q_free.index(WG), count=1)
    else:
        acc = add_values(p, acc, rings, v_at, v_stage)
    return acc, b_max, b_sum, stage, phase
