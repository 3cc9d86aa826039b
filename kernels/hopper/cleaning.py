"""A value that is no number stays with the requests that see its token, in keys or in values.

Tensor cores multiply every column's values with every row's weights, and 0 times NaN or infinity is
NaN: a mask keeps scores apart, not values. So each warpgroup looks at the results of an item. Where
any are not finite, the CTA runs all its items again, once, and the producer cleans each block: a
column whose values are not finite gets values of 0 and keys of NaN. Rows that see it then have a
score that is NaN, and so NaN everywhere; other rows add 0 times 0. Keys need no cleaning: a mask
replaces the scores of rows that do not see them.

No part of a split tile is counted before it is known to be clean, and no CTA waits for parts before
its second run: each part is counted once, by one run or the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .gather import copy_queries, times, words_of
from .shape import (
    BLOCK,
    HALF_ROWS,
    PRE,
    advance,
    async_load,
    blocks_of,
    group_barrier,
    ticket_of,
    values_of,
)
from .softmax import by_quads, thread_sum


@gluon.jit
def taint(acc):
    """Return float32 [128]: 0, or NaN where a column of results [64, D] is not finite in any row.

    Values that are no numbers are in all rows alike: one of each thread's two rows is looked at.
    """
    x = thread_sum(by_quads(acc * 0.0))
    x, _ = gl.split(gl.permute(gl.reshape(x, [4, 2, 8, 4]), [0, 2, 3, 1]))
    return gl.reshape(x, [128])


@gluon.jit
def show(tainted, rings, WG: gl.constexpr):
    """Let all threads of the CTA read what those of warpgroup WG have found in its results."""
    rings.tainted.index(WG).store((tainted != 0.0).to(gl.int32))
    group_barrier()


@gluon.jit
def is_tainted(rings, WG: gl.constexpr, WARPS: gl.constexpr):
    """Return 1 where a thread of warpgroup WG has shown a result that is not finite, else 0."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])  # every warp reads all of it
    return gl.max(rings.tainted.index(WG).load(L), 0)


@gluon.jit
def must_run_again(rings, WARPS: gl.constexpr):
    """Return 1 where a result of either warpgroup is not finite, else 0: waits until both have
    shown."""
    mbarrier.wait(rings.shown.index(0), 0)
    return is_tainted(rings, 0, WARPS) | is_tainted(rings, 1, WARPS)


@gluon.jit
def clean(k, v, to, S):
    """Write keys k [64, D] of NaN and values of 0 where a column's values v [64, D] are not finite,
    elsewhere values as they are multiplied."""
    # few rows at a time: the producer has few registers
    STEP: gl.constexpr = 2048 // S.HEAD_DIM
    L: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // S.HEAD_DIM, S.HEAD_DIM // 8], [S.PRODUCER_WARPS, 1], [1, 0]
    )
    for r in gl.static_range(0, BLOCK, STEP):
        b_v = v.slice(r, STEP).load(L)
        finite = gl.sum(b_v.to(gl.float32) * 0.0, 1) == 0.0
        b_v = b_v.to(to.dtype)
        to.slice(r, STEP).store(gl.where(finite[:, None], b_v, gl.zeros_like(b_v)))
        b_k = k.slice(r, STEP).load(L)
        nan = gl.full([STEP, S.HEAD_DIM], float("nan"), gl.float32, L).to(k.dtype)
        k.slice(r, STEP).store(gl.where(finite[:, None], b_k, nan))


@gluon.jit
def produce_cleaned(
    stage, phase, q_phases, q_ptr, k_ptr, v_ptr, words_ptr, slots_ptr, keys_ptr, num_tickets,
    steps, stride_q, stride_k, stride_v, rings, S,
):  # fmt: skip
    """Load every block of the CTA's items again, one at a time and cleaned."""
    # fewer threads a row than in the first run, and so fewer slots and registers; what both runs
    # have in common the compiler would keep for both
    LANES: gl.constexpr = 4 if S.HEAD_DIM <= 128 else 2
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [S.PRODUCER_WARPS, 1], [1, 0])
    KL: gl.constexpr = gl.BlockedLayout([4], [32], [S.PRODUCER_WARPS], [0])
    PRODUCERS: gl.constexpr = 32 * S.PRODUCER_WARPS
    offs_n = gl.arange(0, BLOCK, gl.SliceLayout(1, L))
    offs_k = gl.arange(0, BLOCK, KL)
    offs_d = gl.arange(0, S.HEAD_DIM, gl.SliceLayout(0, L))
    turn = 0
    ticket = ticket_of(0)
    while ticket < num_tickets:
        item = ticket // S.HEADS
        head = ticket % S.HEADS
        p_item, planned, growing, rows, rest = words_of(words_ptr, ticket, S)
        num_blocks = blocks_of(planned, growing, steps)
        p_k = k_ptr + head * S.HEAD_DIM
        p_v = v_ptr + head * S.HEAD_DIM
        for i in range(num_blocks):
            at = gl.where(i < PRE, item * PRE + i, rest + i - PRE) * BLOCK
            slot = gl.load(slots_ptr + at + offs_n)
            ok = (slot >= 0)[:, None]
            k = rings.kv.index(2 * stage + 1)
            v = rings.kv.index(2 * stage)
            mbarrier.wait(rings.k_free.index(stage), phase ^ 1)
            if S.HEAD_DIM > 128 and not S.NARROW:
                mbarrier.wait(rings.free.index(stage), phase ^ 1)
            async_load(k, p_k + times(slot, stride_k)[:, None] + offs_d[None, :], mask=ok)
            async_load(v, p_v + times(slot, stride_v)[:, None] + offs_d[None, :], mask=ok)
            async_load(rings.keys.index(stage), keys_ptr + at + offs_k)
            async_copy.commit_group()
            async_copy.wait_group(0)
            group_barrier()  # the copies of all warps before they are read
            if S.NARROW:
                mbarrier.wait(rings.free.index(stage), phase ^ 1)
            clean(k, v, values_of(rings, stage, S), S)
            fence_async_shared()
            group_barrier()  # and what all warps wrote before one thread says that it is there
            if S.HEAD_DIM > 128 or S.NARROW:
                mbarrier.arrive(rings.k_full.index(stage), count=PRODUCERS)
            mbarrier.arrive(rings.full.index(stage), count=PRODUCERS)
            if i == 0:
                q_phases = copy_queries(
                    q_ptr, p_item, head, rows, turn, rings, q_phases, stride_q, S, L, HALF_ROWS
                )
            stage, phase = advance(stage, phase, S.STAGES)
        turn += 1
        ticket = ticket_of(turn)
