"""The producer warps: they gather queries and latent rows into shared memory by cp.async.

Where results are not finite, the CTA's items run once more over cleaned rows (hopper/cleaning.py):
a row whose values are not finite gets values of 0, and a rope of NaN, which no value is a part of.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..hopper.cleaning import must_run_again
from ..hopper.gather import times, words_of
from ..hopper.shape import (
    BLOCK,
    H_NUM_ITEMS,
    H_STEPS,
    I_QUERIES,
    PRE,
    advance,
    async_load,
    blocks_of,
    group_barrier,
    ticket_of,
)
from .latent_shape import HALF, ROPE_DIM, STAGES, VALUE_DIM


@gluon.jit
def gather(
    q_ptr, rope_ptr, kv_ptr, words_ptr, slots_ptr, keys_ptr, stride_q, stride_q_head, stride_rope,
    stride_rope_head, stride_kv, r, S,
):  # fmt: skip
    """Gather every item of this CTA, and once more where that is needed."""
    num_tickets = gl.load(words_ptr + H_NUM_ITEMS)
    steps = gl.load(words_ptr + H_STEPS)
    stage = 0
    phase = 0
    q_phase = 0
    stage, phase, q_phase = gather_items(
        q_ptr, rope_ptr, kv_ptr, words_ptr, slots_ptr, keys_ptr, stride_q, stride_q_head,
        stride_rope, stride_rope_head, stride_kv, num_tickets, steps, stage, phase, q_phase, r, S,
        False,
    )  # fmt: skip
    if ticket_of(0) < num_tickets:
        if must_run_again(r, S.PRODUCER_WARPS) != 0:
            gather_items(
                q_ptr, rope_ptr, kv_ptr, words_ptr, slots_ptr, keys_ptr, stride_q, stride_q_head,
                stride_rope, stride_rope_head, stride_kv, num_tickets, steps, stage, phase,
                q_phase, r, S, True,
            )  # fmt: skip


@gluon.jit
def gather_items(
    q_ptr, rope_ptr, kv_ptr, words_ptr, slots_ptr, keys_ptr, stride_q, stride_q_head, stride_rope,
    stride_rope_head, stride_kv, num_tickets, steps, stage, phase, q_phase, r, S,
    CLEAN: gl.constexpr,
):  # fmt: skip
    """Gather the queries and blocks of every item; returns stage and phases behind the last."""
    # eight lanes copy 128 bytes of a row
    L: gl.constexpr = gl.BlockedLayout(
        [BLOCK // (4 * S.PRODUCER_WARPS), 8], [4, 8], [S.PRODUCER_WARPS, 1], [1, 0]
    )
    KL: gl.constexpr = gl.BlockedLayout([4], [32], [S.PRODUCER_WARPS], [0])
    PRODUCERS: gl.constexpr = 32 * S.PRODUCER_WARPS
    offs_n = gl.arange(0, BLOCK, gl.SliceLayout(1, L))
    offs_h = gl.arange(0, HALF, gl.SliceLayout(0, L))
    offs_r = gl.arange(0, ROPE_DIM, gl.SliceLayout(0, L))
    offs_k = gl.arange(0, BLOCK, KL)
    turn = 0
    ticket = ticket_of(0)
    slot = gl.load(slots_ptr + ticket * (PRE * BLOCK) + offs_n)
    while ticket < num_tickets:
        next_ticket = ticket_of(turn + 1)
        # the next item's first slots arrive while this one's blocks are copied: see PRE
        known = gl.where(next_ticket < num_tickets, next_ticket, ticket)
        first_slot = gl.load(slots_ptr + known * (PRE * BLOCK) + offs_n)
        p_item, planned, growing, rows, rest = words_of(words_ptr, ticket, S)
        num_blocks = blocks_of(planned, growing, steps)
        ok_q = offs_n < rows
        query = gl.load(p_item + I_QUERIES + offs_n // S.GROUP, mask=ok_q, other=0)
        for i in range(num_blocks):
            at = gl.where(i < PRE, ticket * PRE + i, rest + i - PRE) * BLOCK
            behind = gl.where(i + 1 < PRE, ticket * PRE + i + 1, rest + i + 1 - PRE) * BLOCK
            # the slots of the next block arrive while this one's rows are copied
            next_slot = gl.load(slots_ptr + behind + offs_n)
            ok = (slot >= 0)[:, None]  # elsewhere the address is not read
            p_kv = (kv_ptr + times(slot, stride_kv))[:, None]
            mbarrier.wait(r.free0.index(stage), phase ^ 1)
            async_load(r.kr.index(stage), p_kv + VALUE_DIM + offs_r[None, :], mask=ok)
            async_load(r.c0.index(stage), p_kv + offs_h[None, :], mask=ok)
            async_load(r.keys.index(stage), keys_ptr + at + offs_k)
            if not CLEAN:
                async_copy.mbarrier_arrive(r.full0.index(stage), increment_count=False)
            mbarrier.wait(r.free1.index(stage), phase ^ 1)
            async_load(r.c1.index(stage), p_kv + HALF + offs_h[None, :], mask=ok)
            if CLEAN:
                async_copy.commit_group()
                async_copy.wait_group(0)
                group_barrier()  # the copies of all warps before they are read
                clean_rows(r.c0.index(stage), r.c1.index(stage), r.kr.index(stage), S)
                fence_async_shared()
                group_barrier()  # and what all warps wrote before one thread says that it is there
                mbarrier.arrive(r.full0.index(stage), count=PRODUCERS)
                mbarrier.arrive(r.full1.index(stage), count=PRODUCERS)
            else:
                async_copy.mbarrier_arrive(r.full1.index(stage), increment_count=False)
            if i == 0:  # the words that say which queries have arrived by then
                head = offs_n % S.GROUP
                p_q = q_ptr + times(query, stride_q) + head * stride_q_head
                p_r = rope_ptr + times(query, stride_rope) + head * stride_rope_head
                mbarrier.wait(r.q_free.index(0), q_phase ^ 1)
                q_phase ^= 1
                async_load(r.qr.index(0), p_r[:, None] + offs_r[None, :], mask=ok_q[:, None])
                async_load(r.q0.index(0), p_q[:, None] + offs_h[None, :], mask=ok_q[:, None])
                async_load(r.q1.index(0), p_q[:, None] + HALF + offs_h[None, :], mask=ok_q[:, None])
                async_copy.mbarrier_arrive(r.q_full.index(0), increment_count=False)
            slot = next_slot
            stage, phase = advance(stage, phase, STAGES)
        slot = first_slot
        turn += 1
        ticket = next_ticket
    return stage, phase, q_phase


@gluon.jit
def clean_rows(c0, c1, kr, S):
    """Write values c0, c1 [64, 256] of 0 and ropes kr [64, 64] of NaN where a row's values are not
    finite."""
    STEP: gl.constexpr = 2 * S.PRODUCER_WARPS  # few rows at a time: there are few registers
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [S.PRODUCER_WARPS, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [S.PRODUCER_WARPS, 1], [1, 0])
    for i in gl.static_range(0, BLOCK, STEP):
        left = c0.slice(i, STEP).load(L)
        right = c1.slice(i, STEP).load(L)
        sums = gl.sum(left.to(gl.float32) * 0.0 + right.to(gl.float32) * 0.0, 1)
        finite = (sums == 0.0)[:, None]
        c0.slice(i, STEP).store(gl.where(finite, left, gl.zeros_like(left)))
        c1.slice(i, STEP).store(gl.where(finite, right, gl.zeros_like(right)))
        rope = kr.slice(i, STEP).load(LR)
        nan = gl.full([STEP, ROPE_DIM], float("nan"), gl.float32, LR).to(kr.dtype)
        known = gl.convert_layout(sums, gl.SliceLayout(1, LR)) == 0.0
        kr.slice(i, STEP).store(gl.where(known[:, None], rope, nan))
