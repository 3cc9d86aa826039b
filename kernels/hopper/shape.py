"""What the roles of Hopper's kernel share: its constants, arguments, rings and small steps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sgl_prefix_attn.kernels import words as W

from ..aggregate import aggregate

try:
    from triton.experimental.gluon.language import thread_barrier as group_barrier  # Triton 3.6
except ImportError:
    from triton.experimental.gluon.language import barrier as group_barrier  # noqa: F401  from 3.7
try:
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import async_load  # from 3.9
except ImportError:
    from triton.experimental.gluon.language.nvidia.ampere.async_copy import (
        async_copy_global_to_shared as async_load,  # noqa: F401
    )

HEADER_WORDS, PRE, BLOCK = (gl.constexpr(x) for x in (W.HEADER_WORDS, W.PRE, W.BLOCK))
TILE_ROWS, HALF_ROWS = gl.constexpr(W.TILE_ROWS), gl.constexpr(W.HALF_ROWS)
H_STEPS, H_NUM_ITEMS = gl.constexpr(W.H_STEPS), gl.constexpr(W.H_NUM_ITEMS)
I_BLOCKS, I_ROWS, I_GROWING = (gl.constexpr(x) for x in (W.I_BLOCKS, W.I_ROWS, W.I_GROWING))
I_REST, I_FLAGS, I_QUERIES = (gl.constexpr(x) for x in (W.I_REST, W.I_FLAGS, W.I_QUERIES))
I_PART, I_PARTS = gl.constexpr(W.I_PART), gl.constexpr(W.I_PARTS)
I_PARTIAL, I_COUNTER = gl.constexpr(W.I_PARTIAL), gl.constexpr(W.I_COUNTER)
MASKED, FOR_WARPGROUP = gl.constexpr(W.MASKED), gl.constexpr(W.FOR_WARPGROUP)
FLAG_BITS, FLAGS_PER_WORD = gl.constexpr(W.FLAG_BITS), gl.constexpr(W.FLAGS_PER_WORD)
FLAGS_OF_BLOCK = gl.constexpr((1 << W.FLAG_BITS) - 1)
GROWTH_FLAGS = gl.constexpr(W.GROWTH_FLAGS)
LOG2_E = gl.constexpr(1.4426950408889634)
# below every score: rows that have seen no column yet must not make inf - inf
LOWEST = gl.constexpr(-1.0e30)


@aggregate
class Shape:
    """What a kernel is compiled for.

    HEADS     KV heads; GROUP query heads each; HEAD_DIM 64, 128 or 256
    STAGES    blocks of K, and of V, that the rings hold
    LOOKAHEAD blocks that slots are asked for ahead, PRE or more
    ITEM, BIT_KEYS  item_words(GROUP) and has_bit_keys(GROUP) of words.py
    HAS_CAP   cap the logits; HAS_LSE write the LSE; HAS_SINK add a sink to each row;
              PDL wait for the kernel before by hand
    NARROW    the KV cache is of float8_e4m3fn (e4m3_blocks.py)
    INVARIANT over aligned plans a row's bits do not depend on other rows
    """

    HEADS: gl.constexpr
    GROUP: gl.constexpr
    HEAD_DIM: gl.constexpr
    STAGES: gl.constexpr
    LOOKAHEAD: gl.constexpr
    ITEM: gl.constexpr
    BIT_KEYS: gl.constexpr
    HAS_CAP: gl.constexpr
    HAS_LSE: gl.constexpr
    HAS_SINK: gl.constexpr
    PDL: gl.constexpr
    NARROW: gl.constexpr
    INVARIANT: gl.constexpr
    PRODUCER_WARPS: gl.constexpr


@aggregate
class Rings:
    """Shared memory: q [2, 64, D], which of head dim 256 and a narrow KV cache two terms take over;
    kv [2 * STAGES, 64, D] with V in even and K in odd buffers; v: the same buffers, or of a narrow
    KV cache its V in half precision, [STAGES, 64, D]; in v, up to head dim 128, zeros in one more;
    keys int32 [STAGES, 64]; and mbarriers: what they guard is there (full) or may be overwritten
    (free). full and free are those of values, k_full and k_free those of keys: the same but for
    head dim 256, whose two stages pass K on by itself, and for a narrow KV cache, where full and
    free are of converted values.
    tainted int32 [2, 128]: what the threads of each warpgroup found, `shown` by both (cleaning.py)

    Barriers of one allocation would be kept apart by a barrier of all four warps between any two
    uses: hence one allocation for each purpose.
    """

    q: gl.shared_memory_descriptor
    kv: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    tainted: gl.shared_memory_descriptor
    shown: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor


@gluon.jit
def values_of(rings, stage, S):
    """Return the values [64, D] of a stage as they are multiplied; zeros behind the last stage."""
    return rings.v.index(stage if S.NARROW else stage * 2)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of a ring, and the parity of its barriers."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def release(free):
    """Give back what a barrier guards. Every thread arrives for itself, as it would for its copies,
    of which it has none under way: one arrival for the warpgroup would wait for all of its
    warps."""
    async_copy.mbarrier_arrive(free, increment_count=False)


@gluon.jit
def ticket_of(turn):
    """Return the CTA's ticket of a turn: turns go back and forth, so that heaviest-first lists
    balance."""
    grid = gl.num_programs(0)
    cta = gl.program_id(0)
    return turn * grid + gl.where((turn & 1) == 1, grid - 1 - cta, cta)


@gluon.jit
def blocks_of(planned, growing, steps):
    """Count the blocks of an item, those that grew since the plan included."""
    return planned + (steps * growing + BLOCK - 1) // BLOCK


@gluon.jit
def wait_for_kernel_before():
    """Wait, as programmatic dependent launch has it: everything before this may overlap with that
    kernel, and reads nothing that it writes: words, slots and keys alone, which append and fill
    have written.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_next_kernel_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def read_counter(p):
    """Read a counter's value, with everything that was written before it was counted up."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l",
        [p.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
