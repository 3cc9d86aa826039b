"""KV caches of float8_e4m3fn in Hopper's kernel: what the roles do otherwise than over 16-bit ones.

Keys are multiplied as they came, with queries of two terms: e4m3 numbers, and what their rounding
left in a second one. In units that are powers of two, one for each row, the two hold every bfloat16
down to 2^-8 of the row's largest, and of smaller ones the bits above 2^-16 of it.
Values become half precision in the producer, some blocks after they were asked for: pending blocks
are those that have been asked for and have not been passed on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .shape import BLOCK, group_barrier, values_of

# The largest element of a query becomes 2^6 to 2^7, or where the logarithm is a last place short
# up to 2^8: below 448, the largest e4m3.
_TOP = gl.constexpr(6.0)


@gluon.jit
def two_terms(q, ROWS: gl.constexpr):
    """Return queries [64, D] as two e4m3 terms, and the unit of each row of their sum [64], laid
    out as ROWS."""
    x = q.to(gl.float32)
    most = gl.maximum(gl.max(gl.abs(x), 1), 1e-30)
    unit = gl.exp2(gl.floor(gl.log2(most)) - _TOP)
    x = x / unit[:, None]
    high = x.to(gl.float8e4nv)
    low = (x - high.to(gl.float32)).to(gl.float8e4nv)
    return high, low, gl.convert_layout(unit, ROWS)


@gluon.constexpr_function
def ahead(S):
    """Return how many blocks may be pending besides the one that is asked for next: as many as
    there are places for converted values. That one may take the stage of a block whose values a
    warpgroup holds until it has the scores of the next one; or, where it passes that on, of the one
    behind it: at least three stages more."""
    assert S.STAGES >= 6
    return S.STAGES // 2


@gluon.jit
def wait_for_room(stage, phase, rings, S):
    """Wait until the values whose place a stage's take, those of half a ring before, are used."""
    HALF: gl.constexpr = S.STAGES // 2
    same = stage >= HALF  # in the same round of the ring
    mbarrier.wait(
        rings.free.index(gl.where(same, stage - HALF, stage + HALF)),
        gl.where(same, phase, phase ^ 1),
    )


@gluon.jit
def convert(stage, rings, S):
    """Turn a stage's values, which have come and have room, into half precision, and pass the stage
    on."""
    # eight elements a thread: 8 bytes read, 16 written, neither with a bank conflict
    L: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // S.HEAD_DIM, S.HEAD_DIM // 8], [S.PRODUCER_WARPS, 1], [1, 0]
    )
    # Half of them at a time, because the producer has few registers; not less, because the compiler
    # sets a barrier between any two. One that it sets behind wait_group is for all warps' copies.
    STEP: gl.constexpr = min(4096 // S.HEAD_DIM, BLOCK)
    for r in gl.static_range(0, BLOCK, STEP):
        values = rings.kv.index(2 * stage).slice(r, STEP).load(L).to(gl.float16)
        values_of(rings, stage, S).slice(r, STEP).store(values)
    group_barrier()  # and what all warps wrote before one thread says that it is there
    mbarrier.arrive(rings.full.index(stage), count=32 * S.PRODUCER_WARPS)


@gluon.jit
def convert_late(pending, stage, AHEAD: gl.constexpr, rings, S):
    """Convert the oldest block where more than AHEAD are pending; returns how many are left. It has
    room: whose place it takes is the block whose stage the newest one has taken."""
    if pending > AHEAD:
        async_copy.wait_group(AHEAD)
        at = stage - AHEAD
        convert(gl.where(at < 0, at + S.STAGES, at), rings, S)
        pending -= 1
    return pending


@gluon.jit
def convert_all_but(most, pending, stage, phase, rings, S):
    """Convert blocks until at most so many are pending; returns how many are."""
    if pending > most:
        async_copy.wait_group(0)
        while pending > most:
            at = stage + 1 - pending
            wraps = at < 0
            at = gl.where(wraps, at + S.STAGES, at)
            wait_for_room(at, gl.where(wraps, phase ^ 1, phase), rings, S)
            convert(at, rings, S)
            pending -= 1
    return pending
