"""What both runs of the producer gather by: the words of an item, its queries, addresses."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .shape import (
    HALF_ROWS,
    HEADER_WORDS,
    I_BLOCKS,
    I_GROWING,
    I_QUERIES,
    I_REST,
    I_ROWS,
    async_load,
)


@gluon.jit
def copy_queries(
    q_ptr, p_item, head, rows, turn, rings, q_phases, stride_q, S, L: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """Copy queries of one item into the buffers of the warpgroups that run it, STEP rows at a time
    laid out as L; returns the phases."""
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
                async_load(
                    rings.q.index(w).slice(r, STEP),
                    p_q[:, None] + offs_d[None, :],
                    mask=ok[:, None],
                )
            async_copy.mbarrier_arrive(rings.q_full.index(w), increment_count=False)
            q_phases ^= 1 << w
    return q_phases


@gluon.jit
def times(slot, stride):
    """Return slot * stride as int64 in one instruction, where int64 times int64 takes four."""
    offset = gl.inline_asm_elementwise(
        "mul.wide.s32 $0, $1, $2;", "=l,r,r", [slot, stride], dtype=gl.int64, is_pure=True, pack=1
    )
    return gl.multiple_of(offset, 16)


@gluon.jit
def words_of(words_ptr, ticket, S):
    """Return the place of a ticket's item, and those of its words that its blocks are copied by."""
    p_item = words_ptr + HEADER_WORDS + ticket // S.HEADS * S.ITEM
    planned = gl.load(p_item + I_BLOCKS)
    growing = gl.load(p_item + I_GROWING)
    return p_item, planned, growing, gl.load(p_item + I_ROWS), gl.load(p_item + I_REST)
