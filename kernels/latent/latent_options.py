"""Which shapes the kernel over latent KV is built for, and how."""

from __future__ import annotations

from sgl_prefix_attn.kernels import words as W

VALUE_DIM, ROPE_DIM = 512, 64  # of DeepSeek V2 to V3 and of Kimi: a row is one behind the other
MOST_HEADS = 32  # of which a tile then has two queries; products bound more of them
PRODUCER_WARPS = 4
# Registers a thread that the launch reserves, and those of each role but the first, which gets what
# is left.
LAUNCH_REGS, RIGHT_REGS, PRODUCER_REGS = 168, 168, 104


def latent_constants(num_qo_heads: int, *, has_lse: bool) -> dict:
    """Return the constants that latent_tile_kernel is compiled with. Raises ValueError for more
    heads than it is built for."""
    if not 1 <= num_qo_heads <= MOST_HEADS:
        raise ValueError(f"{num_qo_heads} query heads over latent KV: 1 to {MOST_HEADS}")
    return {
        "GROUP": num_qo_heads,
        "ITEM": W.item_words(num_qo_heads, W.HALF_ROWS),
        "BIT_KEYS": W.has_bit_keys(num_qo_heads, W.HALF_ROWS),
        "HAS_LSE": has_lse,
        "PRODUCER_WARPS": PRODUCER_WARPS,
        "RIGHT_REGS": RIGHT_REGS,
        "PRODUCER_REGS": PRODUCER_REGS,
    }


def latent_build() -> dict:
    """Say how Triton builds the kernel: the launch's 4 warps are those of the scores."""
    return {"num_warps": 4, "maxnreg": LAUNCH_REGS}
