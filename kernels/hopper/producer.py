"""The producer warps: they gather queries, keys and values into the rings by cp.async."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .cleaning import must_run_again, produce_cleaned
from .e4m3_blocks import convert_late, convert_rest
from .gather import copy_queries, times, words_of
from .shape import (
    BLOCK,
    H_NUM_ITEMS,
    H_STEPS,
    HALF_ROWS,
    PRE,
    advance,
    async_load,
    blocks_of,
    let_next_kernel_start,
    ticket_of,
    wait_for_kernel_before,
)


@gluon.jit
def copy_block(
    p_k, p_v, p_keys, p_next, slot, offs_d, pending, stage, phase, rings, stride_k, stride_v, S,
):  # fmt: skip
    """Copy keys and values of one block into its stage; returns the slots of the block LOOKAHEAD
    behind, and how many blocks are pending (e4m3_blocks.py).

    These take the registers of the block's own slots and are not touched before their turn: moved
    to other registers they would be waited for here.
    """
    ok = slot >= 0  # elsewhere the address is not read
    to_k = times(slot, stride_k)
    to_v = times(slot, stride_v)
    mbarrier.wait(rings.k_free.index(stage), phase ^ 1)
    async_load(
        rings.kv.index(2 * stage + 1), p_k + to_k[:, None] + offs_d[None, :], mask=ok[:, None]
    )
    async_load(rings.keys.index(stage), p_keys)
    if S.HEAD_DIM > 128 or S.NARROW:
        async_copy.mbarrier_arrive(rings.k_full.index(stage), increment_count=False)
    if S.HEAD_DIM > 128 and not S.NARROW:
        mbarrier.wait(rings.free.index(stage), phase ^ 1)
    async_load(rings.kv.index(2 * stage), p_v + to_v[:, None] + offs_d[None, :], mask=ok[:, None])
    if S.NARROW:
        async_copy.commit_group()
        pending = convert_late(pending + 1, stage, phase, rings, S)
    else:
        async_copy.mbarrier_arrive(rings.full.index(stage), increment_count=False)
    return gl.load(p_next), pending


@gluon.jit
def first_slots(of_first_block, p_first, p_rest, S):
    """Return a tuple: the slots of an item's first LOOKAHEAD blocks."""
    slots = (of_first_block,)
    for b in gl.static_range(1, S.LOOKAHEAD):
        p_slots = p_first + b * BLOCK if b < PRE else p_rest + (b - PRE) * BLOCK
        slots = slots + (gl.load(p_slots),)
    return slots


@gluon.jit
def produce(
    q_ptr, k_ptr, v_ptr, words_ptr, slots_ptr, keys_ptr, stride_q, stride_k, stride_v, rings, S,
):  # fmt: skip
    """Load every block of every item of this CTA, in order.

    Slots are loaded LOOKAHEAD blocks ahead, and arrive behind all that was asked for before: no
    more blocks than that are under way at once.
    """
    gl.static_assert(S.LOOKAHEAD >= PRE)
    # Eight threads copy 128 bytes of a row, a whole line. More of them would compute its address
    # more often, and the consumers need the issue slots; with fewer, an instruction has more rows,
    # each of another page of memory, and looking pages up takes longer than the bytes.
    WIDTH: gl.constexpr = 16 if S.NARROW else 8  # elements of 16 bytes
    LANES: gl.constexpr = min(S.HEAD_DIM // WIDTH, 8)
    RUN: gl.constexpr = BLOCK * LANES // (32 * S.PRODUCER_WARPS)
    L: gl.constexpr = gl.BlockedLayout(
        [RUN, WIDTH], [32 // LANES, LANES], [S.PRODUCER_WARPS, 1], [1, 0]
    )
    QL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [S.PRODUCER_WARPS, 1], [1, 0])
    # of head dim 256 few rows at a time: the slots of blocks fill the registers
    Q_STEP: gl.constexpr = HALF_ROWS if S.HEAD_DIM <= 128 else 4 * S.PRODUCER_WARPS
    KL: gl.constexpr = gl.BlockedLayout([4], [32], [S.PRODUCER_WARPS], [0])
    offs_n = gl.arange(0, BLOCK, gl.SliceLayout(1, L))
    offs_k = gl.arange(0, BLOCK, KL)
    offs_d = gl.arange(0, S.HEAD_DIM, gl.SliceLayout(0, L))

    turn = 0
    ticket = ticket_of(0)
    # nothing here waits for anything but the ticket's number: see PRE
    p_slots = slots_ptr + ticket // S.HEADS * (PRE * BLOCK) + offs_n
    next_slots = gl.load(p_slots)
    num_tickets = gl.load(words_ptr + H_NUM_ITEMS) * S.HEADS
    steps = gl.load(words_ptr + H_STEPS)
    first = gl.where(ticket < num_tickets, ticket, 0)
    p_item, planned, growing, rows, rest = words_of(words_ptr, first, S)
    rest = gl.where(ticket < num_tickets, rest, 0)  # without items it may be anything
    slots = first_slots(next_slots, p_slots, slots_ptr + rest * BLOCK + offs_n, S)
    if S.PDL:
        wait_for_kernel_before()
        # Not earlier: so the next kernel starts when the one before this one is done.
        let_next_kernel_start()
    stage = 0
    phase = 0
    q_phases = 0
    pending = 0
    while ticket < num_tickets:
        item = ticket // S.HEADS
        head = ticket % S.HEADS
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
        for i in range(0, num_blocks, S.LOOKAHEAD):
            p_next = slots_ptr + (rest + i + S.LOOKAHEAD - PRE) * BLOCK + offs_n
            p_keys = keys_ptr + gl.where(i == 0, item * PRE, rest + i - PRE) * BLOCK + offs_k
            p_more = keys_ptr + (rest + i - PRE) * BLOCK + offs_k  # of block PRE and on
            for j in gl.static_range(S.LOOKAHEAD):
                if i + j < num_blocks:
                    behind, pending = copy_block(
                        p_k, p_v, (p_keys if j < PRE else p_more) + j * BLOCK, p_next + j * BLOCK,
                        slots[j], offs_d, pending, stage, phase, rings, stride_k, stride_v, S,
                    )  # fmt: skip
                    slots = slots[:j] + (behind,) + slots[j + 1 :]
                    stage, phase = advance(stage, phase, S.STAGES)
                if j == 0:
                    if i == 0:
                        # behind the first block: the words that say which queries have arrived by
                        # then
                        q_phases = copy_queries(
                            q_ptr, p_item, head, rows, turn, rings, q_phases, stride_q, S, QL,
                            Q_STEP,
                        )  # fmt: skip
        turn += 1
        ticket = next_ticket
        p_item = p_next_item
        planned = next_planned
        growing = next_growing
        rows = next_rows
        rest = next_rest
        slots = first_slots(next_slots, p_slots, slots_ptr + rest * BLOCK + offs_n, S)
    if S.NARROW:
        convert_rest(pending, stage, phase, rings, S)
    if turn > 0:
        if must_run_again(rings, S.PRODUCER_WARPS) != 0:
            produce_cleaned(
                stage, phase, q_phases, q_ptr, k_ptr, v_ptr, words_ptr, slots_ptr, keys_ptr,
                num_tickets, steps, stride_q, stride_k, stride_v, rings, S,
            )  # fmt: skip
