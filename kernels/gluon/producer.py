"""The producer warps: they gather queries, keys and values into the rings by cp.async."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .shape import (
    BLOCK,
    H_NUM_ITEMS,
    H_STEPS,
    HALF_ROWS,
    HEADER_WORDS,
    I_BLOCKS,
    I_GROWING,
    I_QUERIES,
    I_REST,
    I_ROWS,
    PRE,
    advance,
    blocks_of,
    group_barrier,
    let_next_kernel_start,
    ticket_of,
    wait_for_kernel_before,
)


@gluon.jit
def copy_queries(q_ptr, p_item, head, rows, turn, rings, q_phases, stride_q, S):
    """Queries of one item into the buffers of the warpgroups that run it; returns the phases."""
    # of head dim 256 few rows at a time: the slots of blocks fill the registers
    STEP: gl.constexpr = HALF_ROWS if S.HEAD_DIM <= 128 else 4 * S.PRODUCER_WARPS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [S.PRODUCER_WARPS, 1], [1, 0])
    offs_r = gl.arange(0, STEP, gl.SliceLayout(1, L))
    offs_d = gl.arange(0, S.HEAD_DIM, gl.SliceLayout(0, L))
    for w in range(2):
        if (rows > HALF_ROWS) | ((turn & 1) == w):
            mbarrier.wait(rings.q_free.index(w), ((q_phases >> w) & 1) ^ 1)
            for r in gl.static_range(0, HALF_ROWS, STEP):
                row = offs_r + r + gl.where(rows > HALF_ROWS, w * HALF_ROWS, 0)
                ok = row < rows
                query = gl.load(p_item + I_QUERIES + row // S.GROUP, mask=ok, other=0)
                i_head = head * S.GROUP + row % S.GROUP
                p_q = q_ptr + query.to(gl.int64) * stride_q + i_head * S.HEAD_DIM
                async_copy.async_copy_global_to_shared(
                    rings.q.index(w).slice(r, STEP),
                    p_q[:, None] + offs_d[None, :],
                    mask=ok[:, None],
                )
            async_copy.mbarrier_arrive(rings.q_full.index(w), increment_count=False)
            q_phases ^= 1 << w
    return q_phases


@gluon.jit
def take_ticket(counters_ptr, turn, rings, S):
    """The next ticket that no CTA has, also for the consumers' turn."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [S.PRODUCER_WARPS], [0])
    taken = gl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu") + gl.num_programs(0)
    slot = turn & 1
    mbarrier.wait(rings.t_free.index(slot), ((turn >> 1) & 1) ^ 1)
    rings.tickets.index(slot).store(gl.full([BLOCK], 0, gl.int32, L) + taken)
    group_barrier()  # the stores of all warps before one thread says that they are there
    mbarrier.arrive(rings.t_full.index(slot), count=1)
    return taken


@gluon.jit
def times(slot, stride):
    """slot * stride as int64 in one instruction, where int64 times int64 takes four."""
    offset = gl.inline_asm_elementwise(
        "mul.wide.s32 $0, $1, $2;", "=l,r,r", [slot, stride], dtype=gl.int64, is_pure=True, pack=1
    )
    return gl.multiple_of(offset, 8)


@gluon.jit
def words_of(words_ptr, ticket, S):
    """The place of a ticket's item, and those of its words that its blocks are copied by."""
    p_item = words_ptr + HEADER_WORDS + ticket // S.HEADS * S.ITEM
    planned = gl.load(p_item + I_BLOCKS)
    growing = gl.load(p_item + I_GROWING)
    return p_item, planned, growing, gl.load(p_item + I_ROWS), gl.load(p_item + I_REST)


@gluon.jit
def copy_block(p_k, p_v, p_keys, p_next, slot, offs_d, stage, phase, rings, stride_k, stride_v, S):
    """Keys and values of one block into its stage; returns the slots of the block PRE behind.

    These take the registers of the block's own slots and are not touched before their turn: moved
    to other registers they would be waited for here.
    """
    ok = slot >= 0  # elsewhere the address is not read
    to_k = times(slot, stride_k)
    to_v = times(slot, stride_v)
    mbarrier.wait(rings.k_free.index(stage), phase ^ 1)
    async_copy.async_copy_global_to_shared(
        rings.kv.index(2 * stage), p_k + to_k[:, None] + offs_d[None, :], mask=ok[:, None]
    )
    async_copy.async_copy_global_to_shared(rings.keys.index(stage), p_keys)
    if S.HEAD_DIM > 128:
        async_copy.mbarrier_arrive(rings.k_full.index(stage), increment_count=False)
        mbarrier.wait(rings.free.index(stage), phase ^ 1)
    async_copy.async_copy_global_to_shared(
        rings.kv.index(2 * stage + 1), p_v + to_v[:, None] + offs_d[None, :], mask=ok[:, None]
    )
    async_copy.mbarrier_arrive(rings.full.index(stage), increment_count=False)
    return gl.load(p_next)


@gluon.jit
def produce(
    q_ptr, k_ptr, v_ptr, counters_ptr, words_ptr, slots_ptr, keys_ptr, stride_q, stride_k,
    stride_v, rings, S,
):  # fmt: skip
    """Every block of every item of this CTA, in order. Slots are loaded PRE blocks ahead."""
    # Eight threads copy 128 bytes of a row, a whole line: the fewer of them there are, the fewer
    # compute its address again; the consumers need the issue slots. Of head dim 256 they have left
    # it few registers: four threads a row hold half as many slots.
    LANES: gl.constexpr = 8 if S.HEAD_DIM <= 128 else 4
    RUN: gl.constexpr = BLOCK * LANES // (32 * S.PRODUCER_WARPS)
    L: gl.constexpr = gl.BlockedLayout(
        [RUN, 8], [32 // LANES, LANES], [S.PRODUCER_WARPS, 1], [1, 0]
    )
    KL: gl.constexpr = gl.BlockedLayout([4], [32], [S.PRODUCER_WARPS], [0])
    offs_n = gl.arange(0, BLOCK, gl.SliceLayout(1, L))
    offs_k = gl.arange(0, BLOCK, KL)
    offs_d = gl.arange(0, S.HEAD_DIM, gl.SliceLayout(0, L))

    turn = 0
    ticket = ticket_of(0)
    # nothing here waits for anything but the ticket's number: see PRE
    p_slots = slots_ptr + ticket // S.HEADS * (PRE * BLOCK) + offs_n
    s0 = gl.load(p_slots)
    s1 = gl.load(p_slots + BLOCK)
    s2 = gl.load(p_slots + 2 * BLOCK)
    num_tickets = gl.load(words_ptr + H_NUM_ITEMS) * S.HEADS
    steps = gl.load(words_ptr + H_STEPS)
    first = gl.where(ticket < num_tickets, ticket, 0)
    p_item, planned, growing, rows, rest = words_of(words_ptr, first, S)
    if S.PDL:
        wait_for_kernel_before()
        # Not earlier: so the next kernel starts when the one before this one is done.
        let_next_kernel_start()
    stage = 0
    phase = 0
    q_phases = 0
    while ticket < num_tickets:
        item = ticket // S.HEADS
        head = ticket % S.HEADS
        if S.DYNAMIC:
            next_ticket = take_ticket(counters_ptr, turn, rings, S)
        else:
            next_ticket = ticket_of(turn + 1)
        # The next item's words and first slots arrive while this one's blocks are copied.
        known = gl.where(next_ticket < num_tickets, next_ticket, ticket)
        p_slots = slots_ptr + known // S.HEADS * (PRE * BLOCK) + offs_n
        next_slots = gl.load(p_slots)
        p_next_item, next_planned, next_growing, next_rows, next_rest = words_of(
            words_ptr, known, S
        )

        num_blocks = blocks_of(planned, growing, steps)
        p_k = k_ptr + head * S.HEAD_DIM
        p_v = v_ptr + head * S.HEAD_DIM
        for i in range(0, num_blocks, PRE):
            p_next = slots_ptr + (rest + i) * BLOCK + offs_n  # of block i + PRE
            at = gl.where(i < PRE, item * PRE, rest + i - PRE)
            p_keys = keys_ptr + at * BLOCK + offs_k
            s0 = copy_block(
                p_k, p_v, p_keys, p_next, s0, offs_d, stage, phase, rings, stride_k, stride_v, S
            )
            stage, phase = advance(stage, phase, S.STAGES)
            if i == 0:
                # behind the first block: the words that say which queries have arrived by then
                q_phases = copy_queries(
                    q_ptr, p_item, head, rows, turn, rings, q_phases, stride_q, S
                )
            if i + 1 < num_blocks:
                s1 = copy_block(
                    p_k, p_v, p_keys + BLOCK, p_next + BLOCK, s1, offs_d, stage, phase, rings,
                    stride_k, stride_v, S,
                )  # fmt: skip
                stage, phase = advance(stage, phase, S.STAGES)
            if i + 2 < num_blocks:
                s2 = copy_block(
                    p_k, p_v, p_keys + 2 * BLOCK, p_next + 2 * BLOCK, s2, offs_d, stage, phase,
                    rings, stride_k, stride_v, S,
                )  # fmt: skip
                stage, phase = advance(stage, phase, S.STAGES)
        turn += 1
        ticket = next_ticket
        p_item = p_next_item
        planned = next_planned
        growing = next_growing
        rows = next_rows
        rest = next_rest
        s0 = next_slots
        s1 = gl.load(p_slots + BLOCK)
        s2 = gl.load(p_slots + 2 * BLOCK)
