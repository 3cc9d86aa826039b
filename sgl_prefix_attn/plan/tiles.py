"""Packs -> tiles and KV splits (PAT §5.2 tile selector, §6 long-KV split)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.kernels import layout
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.records import Packs


@dataclass(frozen=True, order=True)
class TileConfig:
    """One compiled forward kernel: rows x KV tokens of a tile, and how the compiler builds it."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class TileSet:
    """The tiles a planner may pick from, and how it splits long KV.

    tiles       in ascending block_m, then block_n; at most layout.MAX_TILES; one queue each
    num_ctas    CTAs resident on the GPU, over which splits spread a long KV stretch
    min_split   KV tokens below which splitting does not pay
    imbalance   longest item, in shares of the ideal time of one CTA, that is left unsplit
    """

    tiles: tuple[TileConfig, ...]
    num_ctas: int
    min_split: int = 128
    imbalance: float = 1.0

    def __post_init__(self):
        if not 0 < len(self.tiles) <= layout.MAX_TILES:
            raise ValueError(f"tiles must hold 1 to {layout.MAX_TILES} tiles")
        if list(self.tiles) != sorted(self.tiles):
            raise ValueError("tiles must be in ascending order of block_m, then block_n")
        if self.num_ctas < 1 or self.min_split < 1 or self.imbalance <= 0:
            raise ValueError("num_ctas, min_split and imbalance must be positive")


@dataclass(frozen=True)
class Tiling:
    """Per pack: tile index, row tiles (each with `queries_per_tile` queries) and KV splits."""

    tile: np.ndarray
    row_tiles: np.ndarray
    queries_per_tile: np.ndarray
    splits: np.ndarray
    item_time: np.ndarray  # predicted time of one work item, for the order in the queue


def tile_packs(packs: Packs, tile_set: TileSet, costs: CostModel) -> Tiling:
    """Pick a tile for every pack and split long KV towards equal work.

    Tile rows round up: the smallest block_m that holds the pack's queries * group_size rows, and
    the largest one, several times, for more. Among tiles of that block_m, the largest block_n not
    above the KV length. A pack is split when one of its items would take longer than `imbalance`
    times the whole step's work divided over all CTAs (an occupancy-aware form of PAT's mean rule).
    Raises ValueError when the group is larger than the largest tile.
    """
    group = costs.group_size
    block_m = np.array([t.block_m for t in tile_set.tiles])
    block_n = np.array([t.block_n for t in tile_set.tiles])
    most_queries = block_m[-1] // group
    if most_queries == 0:
        raise ValueError(
            f"tiles: the largest block_m is {block_m[-1]}, below the group size {group}"
        )
    queries = np.diff(packs.query_offset)
    kv_len = packs.kv_end - packs.kv_start
    row_tiles = -(-queries // most_queries)
    per_tile = -(-queries // row_tiles)
    row_tiles = -(-queries // per_tile)
    first = np.searchsorted(block_m, per_tile * group)  # first tile with enough rows
    sizes = np.searchsorted(block_m, block_m[first], side="right") - first
    tile = first.copy()
    for step in range(1, int(sizes.max(initial=1))):
        larger = (step < sizes) & (block_n[np.minimum(first + step, block_n.size - 1)] <= kv_len)
        tile = np.where(larger, first + step, tile)

    per_token = np.maximum(costs.kv_token, block_m[tile] * costs.mma_row)  # whole GPU, all heads
    work = kv_len * per_token * row_tiles + costs.item
    share = work.sum() / tile_set.num_ctas * tile_set.imbalance
    one_item = kv_len * per_token / costs.num_kv_heads
    splits = np.ceil(one_item / share).astype(np.int64)
    splits = np.minimum(splits, -(-kv_len // tile_set.min_split))
    splits = np.clip(splits, 1, -(-kv_len // layout.SPLIT_UNIT))
    return Tiling(
        tile.astype(np.int32), row_tiles.astype(np.int32), per_tile.astype(np.int32),
        splits.astype(np.int32), one_item / splits,
    )  # fmt: skip
