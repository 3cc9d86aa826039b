"""Which constants the portable kernel is compiled with, for a head configuration."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_prefix_attn.kernels import words as W

# Registers of an SM, of every architecture from sm_80 on; a thread's are given in eights.
_SM_REGISTERS = 65536


@dataclass(frozen=True)
class PortableConfig:
    """How the kernel is built.

    tile_rows  rows of a tile
    block_n    columns at once
    stages     of the pipelined loop; slots, then rows: only with 5 is a block in flight during
               products
    warps      of a CTA
    ctas       CTAs of an SM that registers are left for
    chunk      columns of one tensor of results
    """

    tile_rows: int = 64
    block_n: int = 32
    stages: int = 5
    warps: int = 4
    ctas: int = 2
    chunk: int = 64

    @property
    def max_regs(self) -> int:
        """Return the registers of a thread with which so many CTAs fit an SM."""
        return min(255, _SM_REGISTERS // (32 * self.warps * self.ctas) // 8 * 8)


def portable_config(group_size: int, head_dim: int) -> PortableConfig:
    """Choose how the kernel is built for heads. Raises ValueError for a shape that it is not built
    for."""
    if not 16 <= head_dim <= 256:
        raise ValueError(f"head dim {head_dim} is not within 16 to 256")
    if not 1 <= group_size <= 128:
        raise ValueError(f"{group_size} query heads a KV head: 1 to 128 fit a tile")
    rows = W.portable_tile_rows(group_size)
    if rows > 64:
        return PortableConfig(tile_rows=rows, warps=8, ctas=1)
    return PortableConfig(tile_rows=rows, stages=5 if head_dim <= 128 else 3)


def portable_constants(
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    config: PortableConfig,
    *,
    has_cap: bool,
    has_lse: bool,
    has_sink: bool,
    invariant: bool = False,
) -> dict:
    """Return the constants that row_tile_portable_kernel is compiled with."""
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    return {
        "HEADS": num_kv_heads,
        "GROUP": group_size,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "TILE_ROWS": config.tile_rows,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "ITEM": W.item_words(group_size, config.tile_rows),
        "BIT_KEYS": W.has_bit_keys(group_size, config.tile_rows),
        "HAS_CAP": has_cap,
        "HAS_LSE": has_lse,
        "HAS_SINK": has_sink,
        "CHUNK": min(config.chunk, block_d),
        "INVARIANT": invariant,
    }


def portable_options(config: PortableConfig) -> dict:
    """Say how Triton builds the kernel."""
    return {"num_warps": config.warps, "maxnreg": config.max_regs}
