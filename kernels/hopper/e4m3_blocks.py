"""KV caches of float8_e4m3fn in Hopper's kernel: what the roles do otherwise than over 16-bit ones.

Keys are multiplied as they came, with queries of two terms: e4m3 numbers, and what their rounding
left in a second one. In units that are powers of two, one for each row, the two hold every bfloat16
down to 2^-8 of the row's largest, and of smaller ones the bits above 2^-16 of it.
Values become half precision in the producer, some blocks after they were asked for: pending blocks
are those that have been asked for and not been converted. Keys are passed on as they come, and what
came may be overwritten as soon as they are multiplied: converted values have buffers of their own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .shape import BLOCK, HALF_ROWS, group_barrier, values_of

# The largest element of a query becomes 2^6 to 2^7, or where the logarithm is a last place short
# up to 2^8: below 448, the largest e4m3.
_TOP = gl.constexpr(6.0)


@gluon.constexpr_function
def most_pending(head_dim):
    """Return how many blocks are pending while the next one is asked for, and while an item's
    queries are, behind its first block. Not more: queries wait for those of the item before to be
    taken. These wait for all blocks of the items before that, so that one block of the item before
    may be pending; of head dim 256 they stay until their own item ends, and none may."""
    return 2 if head_dim <= 128 else 1


# Of four elements: as half precision, whose two terms are those of any bfloat16 in these units, as
# e4m3, and what that left as e4m3. A register gets its four at once: Triton would take pairs apart
# to join them.
TWO_TERMS = gl.constexpr("""{
.reg .b16 a, b;
.reg .b32 x, y, w;
cvt.rn.f16x2.f32 x, $3, $2;
cvt.rn.f16x2.f32 y, $5, $4;
cvt.rn.satfinite.e4m3x2.f16x2 a, x;
cvt.rn.satfinite.e4m3x2.f16x2 b, y;
mov.b32 $0, {a, b};
cvt.rn.f16x2.e4m3x2 w, a;
sub.f16x2 x, x, w;
cvt.rn.f16x2.e4m3x2 w, b;
sub.f16x2 y, y, w;
cvt.rn.satfinite.e4m3x2.f16x2 a, x;
cvt.rn.satfinite.e4m3x2.f16x2 b, y;
mov.b32 $1, {a, b};
}""")


@gluon.jit
def two_terms(q, ROWS: gl.constexpr):
    """Return queries [64, D] as two e4m3 terms, and the unit of each row of their sum [64], laid
    out as ROWS."""
    x = q.to(gl.float32)
    power = gl.floor(gl.log2(gl.maximum(gl.max(gl.abs(x), 1), 1e-30))) - _TOP
    unit = gl.exp2(power)
    # powers of two are exact, and a division would take six instructions
    x = x * gl.exp2(-power)[:, None]
    high, low = gl.inline_asm_elementwise(
        TWO_TERMS, "=&r,=&r,f,f,f,f", [x], dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True,
        pack=4,
    )  # fmt: skip
    return high, low, gl.convert_layout(unit, ROWS)


@gluon.jit
def terms_in_place(q, ROWS: gl.constexpr):
    """two_terms of queries [64, D] in shared memory, which the terms take over."""
    D: gl.constexpr = q.shape[1]
    # a thread reads 32 bytes of a row, and writes 16 of either term
    L: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [4, 1], [1, 0])
    TL: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    high, low, unit = two_terms(q.load(L), ROWS)
    terms = q._reinterpret(gl.float8e4nv, [2, HALF_ROWS, D], TL)
    group_barrier()  # all threads have read theirs
    terms.index(0).store(high)
    terms.index(1).store(low)
    fence_async_shared()
    group_barrier()
    return terms.index(0), terms.index(1), unit


@gluon.jit
def convert(count, stage, phase, rings, S):
    """Turn values that have come into half precision and pass them on: those of the block whose
    stage is so many before `stage` in the ring."""
    stage -= count
    wraps = stage < 0
    stage = gl.where(wraps, stage + S.STAGES, stage)
    mbarrier.wait(rings.free.index(stage), gl.where(wraps, phase, phase ^ 1))
    # eight elements a thread: 8 bytes read, 16 written, neither with a bank conflict
    L: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // S.HEAD_DIM, S.HEAD_DIM // 8], [S.PRODUCER_WARPS, 1], [1, 0]
    )
    # Half of them at a time, because the producer has few registers; not less, because Triton 3.6
    # sets a barrier between any two. One that it sets behind wait_group is for all warps' copies.
    STEP: gl.constexpr = min(4096 // S.HEAD_DIM, BLOCK)
    for r in gl.static_range(0, BLOCK, STEP):
        values = rings.kv.index(2 * stage).slice(r, STEP).load(L).to(gl.float16)
        values_of(rings, stage, S).slice(r, STEP).store(values)
    group_barrier()  # and what all warps wrote before one thread says that it is there
    mbarrier.arrive(rings.full.index(stage), count=32 * S.PRODUCER_WARPS)


@gluon.jit
def convert_late(pending, stage, phase, rings, S):
    """Convert the oldest of the pending blocks, the newest of which has taken `stage`, where there
    are too many; returns how many are left."""
    MOST: gl.constexpr = most_pending(S.HEAD_DIM)
    gl.static_assert(S.STAGES > MOST)
    if pending > MOST:
        async_copy.wait_group(MOST)
        convert(MOST, stage, phase, rings, S)
        pending -= 1
    return pending


@gluon.jit
def convert_rest(pending, end, phase, rings, S):
    """Convert all pending blocks, which have taken the stages before `end`."""
    async_copy.wait_group(0)
    while pending > 0:
        convert(pending, end, phase, rings, S)
        pending -= 1
