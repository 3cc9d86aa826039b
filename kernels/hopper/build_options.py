"""Which shapes Hopper's kernel is built for, and how."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_prefix_attn.kernels import words as W

PRODUCER_WARPS = 4
# Registers a thread that the launch reserves; the roles then share them out among themselves.
LAUNCH_REGS = 168


@dataclass(frozen=True)
class Config:
    """stages: blocks in the rings; lookahead: blocks that slots are asked for ahead;
    consumer_regs, producer_regs: a thread's of each role."""

    stages: int
    lookahead: int
    consumer_regs: int
    producer_regs: int


# By head dim.
CONFIGS = {
    64: Config(stages=7, lookahead=6, consumer_regs=200, producer_regs=104),
    128: Config(stages=5, lookahead=3, consumer_regs=200, producer_regs=104),
    256: Config(stages=2, lookahead=3, consumer_regs=224, producer_regs=64),
}
# Over a KV cache of float8_e4m3fn.
NARROW_CONFIGS = {
    64: Config(stages=8, lookahead=4, consumer_regs=200, producer_regs=104),
    128: Config(stages=5, lookahead=4, consumer_regs=200, producer_regs=104),
    256: Config(stages=2, lookahead=3, consumer_regs=216, producer_regs=80),
}


def kernel_constants(
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    *,
    has_cap: bool,
    has_lse: bool,
    has_sink: bool,
    pdl: bool,
    narrow: bool = False,
    invariant: bool = False,
) -> dict:
    """Return the constants that row_tile_kernel is compiled with; narrow: for a KV cache of
    float8_e4m3fn; invariant: for aligned plans. Raises ValueError for a shape that it is not built
    for."""
    configs = NARROW_CONFIGS if narrow else CONFIGS
    if head_dim not in configs:
        raise ValueError(f"head dim {head_dim} is none of {', '.join(map(str, configs))}")
    if not 1 <= group_size <= W.HALF_ROWS:
        raise ValueError(f"{group_size} query heads a KV head: 1 to {W.HALF_ROWS} fit a tile")
    config = configs[head_dim]
    return {
        "HEADS": num_kv_heads,
        "GROUP": group_size,
        "HEAD_DIM": head_dim,
        "STAGES": config.stages,
        "LOOKAHEAD": config.lookahead,
        "ITEM": W.item_words(group_size, W.TILE_ROWS),
        "BIT_KEYS": W.has_bit_keys(group_size, W.TILE_ROWS),
        "HAS_CAP": has_cap,
        "HAS_LSE": has_lse,
        "HAS_SINK": has_sink,
        "PDL": pdl,
        "NARROW": narrow,
        "INVARIANT": invariant,
        "PRODUCER_WARPS": PRODUCER_WARPS,
        "CONSUMER_REGS": config.consumer_regs,
        "PRODUCER_REGS": config.producer_regs,
    }


def compiler_options() -> dict:
    """Say how Triton builds the kernel: the launch's 4 warps are the first consumer's."""
    return {"num_warps": 4, "maxnreg": LAUNCH_REGS}
