"""A warpgroup's 64 rows over the blocks of one item, two blocks a turn.

Half as many turns for as many products: where these bound a step, 128 columns at once take less
time than 64 twice. Where memory does, a ring of three wide stages has too little on its way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .blocks import add_values
from .shape import (
    BLOCK,
    FLAG_BITS,
    FLAGS_OF_BLOCK,
    FLAGS_PER_WORD,
    GROWTH_FLAGS,
    HALF_ROWS,
    LOG2_E,
    LOWEST,
    MASKED,
    advance,
)
from .softmax import keep_visible, quad_sum, soft_cap, softmax_step

PAIR = gl.constexpr(2 * BLOCK)


@gluon.jit
def flags_of_pair(i, word, planned):
    """What the two blocks from i on have set between them. A block behind the last one is masked,
    and its keys show it to nobody."""
    first = gl.where(i < planned, word & FLAGS_OF_BLOCK, GROWTH_FLAGS)
    second = gl.where(i + 1 < planned, (word >> FLAG_BITS) & FLAGS_OF_BLOCK, GROWTH_FLAGS)
    return first | second


@gluon.jit
def attend_pairs(
    rings, p_flags, planned, num_blocks, base, stage, phase, q_phase, sm_scale, logits_soft_cap, S,
    WG: gl.constexpr,
):  # fmt: skip
    """As attend_blocks. Every pair is for both warpgroups: neither passes on two blocks in turn."""
    DTYPE: gl.constexpr = rings.q.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAIR, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.HEAD_DIM, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    SR: gl.constexpr = gl.SliceLayout(1, SL)
    OR: gl.constexpr = gl.SliceLayout(1, OL)
    scale = sm_scale * LOG2_E
    z = gl.zeros([HALF_ROWS, PAIR], gl.float32, SL)
    row_s = base + gl.arange(0, HALF_ROWS, SR)
    b_max = gl.full([HALF_ROWS], LOWEST, gl.float32, SR)
    b_sum = quad_sum(z)
    acc = gl.zeros([HALF_ROWS, S.HEAD_DIM], gl.float32, OL)
    p = gl.zeros([HALF_ROWS, PAIR], DTYPE, PL)
    # One code path for all pairs: the first product with values is of zeros, by K.
    v_at = 2 * stage
    v_stage = stage + 0  # a name of its own: an alias is not carried through a loop
    word = gl.load(p_flags)
    next_word = gl.load(p_flags + 1)
    flags = flags_of_pair(0, word, planned)
    mbarrier.wait(rings.q_full.index(WG), q_phase)
    q = rings.q.index(WG)
    for i in range(0, num_blocks, 2):
        mbarrier.wait(rings.full.index(stage), phase)
        k = rings.kv.index(2 * stage).permute((1, 0))
        s = warpgroup_mma(q, k, z, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, rings.kv.index(v_at), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        if S.HAS_CAP:
            s = soft_cap(s, sm_scale / logits_soft_cap, logits_soft_cap * LOG2_E)
            scale = 1.0
        if (flags & MASKED) != 0:
            key = rings.keys.index(stage).load(gl.SliceLayout(0, SL))
            s = keep_visible(s, key, row_s, S.BIT_KEYS, S.GROUP)
        new = (i + 2) % FLAGS_PER_WORD == 0
        word = gl.where(new, next_word, word >> (2 * FLAG_BITS))
        if new:
            next_word = gl.load(p_flags + (i + 2) // FLAGS_PER_WORD + 1)
        flags = flags_of_pair(i + 2, word, planned)
        s, b_max, b_sum, alpha = softmax_step(s, b_max, b_sum, scale)
        acc, p, s = warpgroup_mma_wait(0, deps=(acc, p, s))
        mbarrier.arrive(rings.free.index(v_stage), count=1, pred=i > 0)
        p = gl.convert_layout(s.to(DTYPE), PL)
        acc = acc * gl.convert_layout(alpha, OR)[:, None]
        v_at = 2 * stage + 1
        v_stage = stage
        stage, phase = advance(stage, phase, S.STAGES)
    # Queries stay in shared memory, which 128 columns leave bandwidth for, and no registers.
    mbarrier.arrive(rings.q_free.index(WG), count=1)
    acc = add_values(p, acc, rings, v_at, v_stage)
    return acc, b_max, b_sum, stage, phase
