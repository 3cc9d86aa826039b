"""The solver: every configuration of a GPU, judged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from eval.tune.compiling import Target, compile_all
from eval.tune.constraints import Verdict, before_compiling, judge
from eval.tune.gpus import GpuLimits
from sgl_prefix_attn.plan.tile_defaults import gpu_tile_set
from sgl_prefix_attn.plan.tiles import TileConfig
from sgl_prefix_attn.records import HeadConfig

BLOCK_M = (8, 16, 32, 64, 128)
BLOCK_N = (8, 16, 32, 64, 128)
WARPS = (1, 2, 4, 8)
STAGES = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Solution:
    """Verdicts in the order of the space; defaults are what the tuning table picks for the GPU."""

    verdicts: list[Verdict]
    defaults: frozenset[TileConfig]


def solve(
    gpu: GpuLimits,
    heads: HeadConfig,
    dtype: str,
    tiles: list[TileConfig] | None = None,
    jobs: int | None = None,
) -> Solution:
    """Judge `tiles` (default: the whole space and the GPU's defaults)."""
    defaults = default_tiles(gpu, heads)
    if tiles is None:
        tiles = list(dict.fromkeys([*space(defaults), *defaults]))
    ruled_out = {tile: before_compiling(tile, heads, gpu) for tile in tiles}
    left = [tile for tile in tiles if not ruled_out[tile]]
    reports = compile_all(left, Target(gpu.arch, heads, dtype), jobs)
    verdicts = [
        judge(tile, reports[tile], heads, gpu, dtype)
        if tile in reports
        else Verdict(tile, None, ruled_out[tile])
        for tile in tiles
    ]
    return Solution(verdicts, frozenset(defaults))


def space(defaults: list[TileConfig]) -> list[TileConfig]:
    """Return all shared configurations, and for tails those of the defaults' requests and block_m:
    more rows than one group needs would only be padding."""
    tails = {(tile.requests, tile.block_m) for tile in defaults if tile.requests}
    kinds = [(0, m) for m in BLOCK_M] + sorted(tails)
    return [
        shape(TileConfig(m, n, num_warps=warps, num_stages=stages, requests=requests))
        for (requests, m), n, warps, stages in product(kinds, BLOCK_N, WARPS, STAGES)
    ]


def default_tiles(gpu: GpuLimits, heads: HeadConfig) -> list[TileConfig]:
    """Return the tiles that the tuning table picks."""
    return [shape(tile) for tile in gpu_tile_set(gpu.num_sms, heads).tiles]


def kernel_name(tile: TileConfig) -> str:
    if not tile.requests:
        return "shared"
    return "tail" if tile.requests == 1 else f"tails x{tile.requests}"


def shape(tile: TileConfig) -> TileConfig:
    """Return the tile without what does not change the compiled kernel."""
    return replace(tile, fill=TileConfig.fill)
