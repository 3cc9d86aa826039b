"""The kernel over latent KV: one launch per layer, whatever the tree.

One CTA per SM runs tiles of up to 64 rows, requests times query heads, over the same words as the
other kernels. Warpgroup 0 makes the scores, the softmax and value columns 0 to 255, warpgroup 1
adds columns 256 to 511 by the probabilities that it finds in shared memory, and four producer warps
gather rows of 1152 bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..hopper.attention import new_barriers
from ..hopper.shape import BLOCK
from .latent_gather import gather
from .latent_scores import score
from .latent_shape import HALF, ROPE_DIM, ROWS, STAGES, LatentRings, LatentShape
from .latent_values import add_right_half


@gluon.jit
def latent_tile_kernel(
    q_ptr,  # [rows, Hq, 512], of any strides of rows and heads
    rope_ptr,  # [rows, Hq, 64], likewise: the rest of the queries
    kv_ptr,  # [slots, 576]
    out_ptr,  # [rows, Hq, 512]
    lse_ptr,  # float32 [rows, Hq], base 2, written where HAS_LSE
    partial_out_ptr,  # float16 [partials, 64, 512]
    partial_state_ptr,  # float32 [partials, 64, 2]: LSE in base 2, bfloat16 scales of both halves
    counters_ptr,  # int32 [counters, 2], 0 before and after
    words_ptr,  # int32 [words]
    slots_ptr,  # int32 [blocks, BLOCK]
    keys_ptr,  # int32 [blocks, BLOCK]
    stride_q,  # elements between rows of q
    stride_q_head,  # and between its heads
    stride_rope,
    stride_rope_head,
    stride_kv,  # elements between slots
    stride_out,
    sm_scale,
    GROUP: gl.constexpr,
    ITEM: gl.constexpr,
    BIT_KEYS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr,
    RIGHT_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """Run all items. Grid (SMs,): not more, because parts of a tile wait for one another."""
    S = LatentShape(1, GROUP, ITEM, BIT_KEYS, HAS_LSE, PRODUCER_WARPS)
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    KL: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PRODUCERS: gl.constexpr = 32 * PRODUCER_WARPS
    r = LatentRings(
        gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], KL),
        gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], KL),
        gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE_DIM], KL),
        gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, HALF], KL),
        gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, HALF], KL),
        gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, ROPE_DIM], KL),
        gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK], KL),
        gl.allocate_shared_memory(gl.float32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK], FLAT),
        gl.allocate_shared_memory(gl.int32, [2, 128], FLAT),
        new_barriers(1, 2),
        new_barriers(1, PRODUCERS),
        new_barriers(1, 1),
        new_barriers(STAGES, PRODUCERS),
        new_barriers(STAGES, PRODUCERS),
        new_barriers(STAGES, 128),
        new_barriers(STAGES, 128),
        new_barriers(1, 1),
        new_barriers(1, 128),
    )
    gl.warp_specialize(
        [
            (
                score,
                (
                    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, words_ptr,
                    stride_out, sm_scale, r, S,
                ),
            ),
            (
                add_right_half,
                (
                    out_ptr, lse_ptr, partial_out_ptr, partial_state_ptr, counters_ptr, words_ptr,
                    stride_out, r, S,
                ),
            ),
            (
                gather,
                (
                    q_ptr, rope_ptr, kv_ptr, words_ptr, slots_ptr, keys_ptr, stride_q,
                    stride_q_head, stride_rope, stride_rope_head, stride_kv, r, S,
                ),
            ),
        ],
        [4, PRODUCER_WARPS],
        [RIGHT_REGS, PRODUCER_REGS],
    )  # fmt: skip
