"""The row-tile kernel: one launch per layer, whatever the tree.

One CTA per SM. A producer warpgroup gathers page-size-1 rows into mbarrier rings, two consumer
warpgroups multiply 64 rows each over the same blocks: 128 rows per KV byte keep the tensor cores
ahead of L2. Items are handed out by number, so a CTA knows all its work from its own index.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .consumer import consume
from .producer import produce
from .shape import BLOCK, HALF_ROWS, Rings, Shape

MAX_STAGES = gl.constexpr(8)


@gluon.jit
def new_barriers(arrivals):
    """mbarriers [MAX_STAGES, 1] that wait for so many arrivals, written with one store.

    mbarrier.init takes turns: some 24 of them take a microsecond. The word is what it writes on
    sm_90 for c arrivals: (2^20 - c) << 1, the arrivals to come, and << 43, those of later phases.
    """
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    bars = gl.allocate_shared_memory(gl.int64, [MAX_STAGES, 1], layout)
    i = gl.arange(0, MAX_STAGES, gl.BlockedLayout([1], [32], [4], [0]))
    left = (0x100000 - arrivals + i * 0).to(gl.int64)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bars._reinterpret(gl.int64, [MAX_STAGES], flat).store((left << 43) | (left << 1))
    return bars


@gluon.jit
def row_tile_kernel(
    q_ptr,  # [rows, Hq, D]
    k_ptr,  # [slots, Hkv, D]
    v_ptr,  # [slots, Hkv, D]
    out_ptr,  # [rows, Hq, D]
    lse_ptr,  # float32 [rows, Hq], base 2, written where HAS_LSE
    partial_out_ptr,  # float16 [partials, Hkv, TILE_ROWS, D]
    partial_state_ptr,  # float32 [partials, Hkv, TILE_ROWS, 2]: LSE in base 2, scale of the row
    counters_ptr,  # int32 [counters, Hkv, 2], 0 before and after
    words_ptr,  # int32 [words]
    slots_ptr,  # int32 [blocks, BLOCK]
    keys_ptr,  # int32 [blocks, BLOCK]
    stride_q,  # elements between rows of q
    stride_k,  # elements between slots
    stride_v,
    stride_out,
    sm_scale,
    logits_soft_cap,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    ITEM: gl.constexpr,
    BIT_KEYS: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_LSE: gl.constexpr,
    PDL: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
    FUSED_MERGE: gl.constexpr,
    DYNAMIC: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Grid (SMs,): not more, because parts of a tile wait for one another."""
    S = Shape(
        HEADS, GROUP, HEAD_DIM, STAGES, ITEM, BIT_KEYS, HAS_CAP, HAS_LSE, PDL,
        PRODUCER_WARPS, FUSED_MERGE, DYNAMIC,
    )  # fmt: skip
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    KL: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PRODUCERS: gl.constexpr = 32 * PRODUCER_WARPS
    CONSUMERS: gl.constexpr = 2 * 128
    gl.static_assert(STAGES < MAX_STAGES)  # consume() releases one that is none
    gl.static_assert(not (DYNAMIC and FUSED_MERGE), "parts are found again by their numbers")
    keys = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK], FLAT)
    tickets, t_full, t_free = keys, keys, keys  # not used
    if DYNAMIC:
        tickets = gl.allocate_shared_memory(gl.int32, [2, BLOCK], FLAT)
        t_full, t_free = new_barriers(1), new_barriers(2)
    full, free = new_barriers(PRODUCERS), new_barriers(CONSUMERS)
    k_full, k_free = full, free
    if HEAD_DIM > 128:
        k_full, k_free = new_barriers(PRODUCERS), new_barriers(2)
    rings = Rings(
        gl.allocate_shared_memory(DTYPE, [2, HALF_ROWS, HEAD_DIM], KL),
        gl.allocate_shared_memory(DTYPE, [2 * STAGES, BLOCK, HEAD_DIM], KL),
        keys,
        tickets,
        t_full,
        t_free,
        new_barriers(PRODUCERS),
        new_barriers(1),
        k_full,
        k_free,
        full,
        free,
    )
    gl.warp_specialize(
        [
            (
                consume,
                (
                    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, words_ptr,
                    stride_out, sm_scale, logits_soft_cap, rings, S, 0,
                ),
            ),
            (
                consume,
                (
                    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, words_ptr,
                    stride_out, sm_scale, logits_soft_cap, rings, S, 1,
                ),
            ),
            (
                produce,
                (
                    q_ptr, k_ptr, v_ptr, counters_ptr, words_ptr, slots_ptr, keys_ptr, stride_q,
                    stride_k, stride_v, rings, S,
                ),
            ),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
