"""Hopper's kernel: one launch per layer, whatever the tree.

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


@gluon.jit
def new_barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """Make mbarriers [COUNT, 1] that wait for so many arrivals.

    By mbarrier.init alone: PTX allows nothing else. A plain store of the same word is faster, but
    an SM caches these words, and may go on with what an earlier kernel had at the address.
    """
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def row_tile_kernel(
    q_ptr,  # [rows, Hq, D]
    k_ptr,  # [slots, Hkv, D], as q or float8_e4m3fn
    v_ptr,  # [slots, Hkv, D], as k
    out_ptr,  # [rows, Hq, D]
    lse_ptr,  # float32 [rows, Hq], base 2, written where HAS_LSE
    partial_out_ptr,  # float16, float32 if INVARIANT [partials, Hkv, TILE_ROWS, D]
    # float32 [partials, Hkv, TILE_ROWS, 2]: LSE in base 2, scale of the row; if INVARIANT its
    # maximum and sum
    partial_state_ptr,
    counters_ptr,  # int32 [counters, Hkv, 2], 0 before and after
    words_ptr,  # int32 [words]
    slots_ptr,  # int32 [blocks, BLOCK]
    keys_ptr,  # int32 [blocks, BLOCK]
    sinks_ptr,  # [Hq], None where not HAS_SINK
    stride_q,  # elements between rows of q
    stride_k,  # elements between slots
    stride_v,
    stride_out,
    sm_scale,  # times the scale of keys of float8_e4m3fn
    logits_soft_cap,
    v_scale,  # of values of float8_e4m3fn
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    LOOKAHEAD: gl.constexpr,
    ITEM: gl.constexpr,
    BIT_KEYS: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_LSE: gl.constexpr,
    HAS_SINK: gl.constexpr,
    PDL: gl.constexpr,
    NARROW: gl.constexpr,
    INVARIANT: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Run all items. Grid (SMs,): not more, because parts of a tile wait for one another."""
    S = Shape(
        HEADS, GROUP, HEAD_DIM, STAGES, LOOKAHEAD, ITEM, BIT_KEYS, HAS_CAP, HAS_LSE, HAS_SINK, PDL,
        NARROW, INVARIANT, PRODUCER_WARPS,
    )  # fmt: skip
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    KV_DTYPE: gl.constexpr = k_ptr.dtype.element_ty
    KL: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PRODUCERS: gl.constexpr = 32 * PRODUCER_WARPS
    CONSUMERS: gl.constexpr = 2 * 128
    ZEROS: gl.constexpr = 1 if HEAD_DIM <= 128 else 0
    # consume() also releases, and of a narrow KV cache waits for, values behind the last: none
    full, free = new_barriers(STAGES + NARROW, PRODUCERS), new_barriers(STAGES + 1, CONSUMERS)
    k_full, k_free = full, free
    if HEAD_DIM > 128 or NARROW:
        k_full = new_barriers(STAGES, PRODUCERS)
        k_free = new_barriers(STAGES, CONSUMERS if NARROW else 2)
    if NARROW:
        NL: gl.constexpr = gl.NVMMASharedLayout(min(HEAD_DIM, 128), 8, 2)
        kv = gl.allocate_shared_memory(KV_DTYPE, [2 * STAGES, BLOCK, HEAD_DIM], NL)
        v = gl.allocate_shared_memory(gl.float16, [STAGES + ZEROS, BLOCK, HEAD_DIM], KL)
    else:
        kv = gl.allocate_shared_memory(DTYPE, [2 * STAGES + ZEROS, BLOCK, HEAD_DIM], KL)
        v = kv
    rings = Rings(
        gl.allocate_shared_memory(DTYPE, [2, HALF_ROWS, HEAD_DIM], KL),
        kv,
        v,
        gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK], FLAT),
        gl.allocate_shared_memory(gl.int32, [2, 128], FLAT),
        new_barriers(1, 2),
        new_barriers(2, PRODUCERS),
        new_barriers(2, 1),
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
                    sinks_ptr, stride_out, sm_scale, logits_soft_cap, v_scale, rings, S, 0,
                ),
            ),
            (
                consume,
                (
                    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, words_ptr,
                    sinks_ptr, stride_out, sm_scale, logits_soft_cap, v_scale, rings, S, 1,
                ),
            ),
            (
                produce,
                (
                    q_ptr, k_ptr, v_ptr, words_ptr, slots_ptr, keys_ptr, stride_q, stride_k,
                    stride_v, rings, S,
                ),
            ),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
