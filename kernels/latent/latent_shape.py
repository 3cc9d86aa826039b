"""What the roles of the kernel over latent KV share: its constants and its shared memory."""

from triton.experimental.gluon import language as gl

from sgl_prefix_attn.kernels import words as W

from ..aggregate import aggregate
from . import latent_options

ROWS = gl.constexpr(W.HALF_ROWS)  # of a tile
HALF = gl.constexpr(256)  # value columns of each warpgroup
VALUE_DIM, ROPE_DIM = gl.constexpr(latent_options.VALUE_DIM), gl.constexpr(latent_options.ROPE_DIM)
STAGES = gl.constexpr(2)


@aggregate
class LatentShape:
    """What a kernel is compiled for: GROUP query heads of HEADS KV heads, which is one; ITEM,
    BIT_KEYS  item_words and has_bit_keys of words.py; HAS_LSE  write the LSE."""

    HEADS: gl.constexpr
    GROUP: gl.constexpr
    ITEM: gl.constexpr
    BIT_KEYS: gl.constexpr
    HAS_LSE: gl.constexpr
    PRODUCER_WARPS: gl.constexpr


@aggregate
class LatentRings:
    """Shared memory, of which a row's 576 elements are in three parts: columns 0 to 255, 256 to 511
    and the rope.

    q0, q1, qr  [1, 64, 256] twice and [1, 64, 64]: queries of a tile
    c0, c1, kr  the same of STAGES blocks of KV
    p           [64, 64]: probabilities of a block
    alpha       float32 [64]: what the results of the right half shrink by; in the end 1 / sum
    keys        int32 [STAGES, 64]
    tainted     int32 [2, 128]: what either warpgroup found, `shown` by both (hopper/cleaning.py)

    and mbarriers: what they guard is there (full) or may be overwritten (free). full0 and free0 are
    for c0, kr and keys, full1 and free1 for c1, p_full and p_free for p and alpha.
    """

    q0: gl.shared_memory_descriptor
    q1: gl.shared_memory_descriptor
    qr: gl.shared_memory_descriptor
    c0: gl.shared_memory_descriptor
    c1: gl.shared_memory_descriptor
    kr: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    alpha: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    tainted: gl.shared_memory_descriptor
    shown: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    full0: gl.shared_memory_descriptor
    full1: gl.shared_memory_descriptor
    free0: gl.shared_memory_descriptor
    free1: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_free: gl.shared_memory_descriptor
