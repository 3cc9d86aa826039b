"""Packs -> tiles (PAT §5.2, tile selector)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sgl_prefix_attn.kernels import layout
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.records import Packs


@dataclass(frozen=True)
class TileConfig:
    """One compiled forward kernel: rows x KV tokens of a tile, and how the compiler builds it.

    requests     0: the shared kernel, all rows over the same KV; otherwise the tails kernel with
                 up to that many requests side by side in a tile (a power of two)
    max_regs     registers a thread may have, None: as the compiler likes; fewer let more CTAs fit
    fill         CTAs on every SM with which this tile reaches its full rate (measured)
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3
    requests: int = 0
    max_regs: int | None = None
    fill: float = 2.0


@dataclass(frozen=True)
class TileSet:
    """The tiles a planner may pick from, and how it splits long KV.

    shared       for KV that several queries share, in ascending block_m
    tail         for one request's tail
    packed_tail  for several short tails at once, or None
    packed_len   longest tail, in KV tokens, that is packed with others
    packed_tickets  tickets that packed tails must still leave, else packing starves the GPU
    num_sms      multiprocessors, over which splits spread a long KV stretch
    min_split    KV tokens below which splitting does not pay
    longest      shares of the step's ideal time that one work item may take before it is split,
                 of which splits.py takes the best

    The queues of a plan are numbered as `tiles`.
    """

    shared: tuple[TileConfig, ...]
    tail: TileConfig
    num_sms: int
    packed_tail: TileConfig | None = None
    packed_len: int = 128
    min_split: int = 128
    packed_tickets: int = 256
    longest: tuple[float, ...] = (0.75, 0.55, 0.4)

    def __post_init__(self):
        if len(self.tiles) > layout.MAX_TILES:
            raise ValueError(f"shared must hold at most {layout.MAX_TILES - 2} tiles")

    def check_group(self, group_size: int) -> None:
        """Raise ValueError, naming the tile, unless the tails' tiles and the largest shared one
        hold a group's query heads."""
        for tile in (*self.tiles[: self.first_shared], self.shared[-1]):
            requests = max(1, tile.requests)
            if tile.block_m < requests * group_size or tile.block_n % requests:
                raise ValueError(
                    f"{tile} cannot hold {requests} request(s) of {group_size} query heads each"
                )

    def packs_tails(self, num_short: int, num_kv_heads: int) -> bool:
        """Tell whether so many short tails are packed: the fewer, the less packing pays."""
        if self.packed_tail is None:
            return False
        tickets = num_short // self.packed_tail.requests * num_kv_heads
        return tickets >= self.packed_tickets

    def usable(self, batch_size: int, num_kv_heads: int) -> list[int]:
        """List the tiles a plan of at most batch_size requests may use, as indices into `tiles`."""
        unused = None if self.packs_tails(batch_size, num_kv_heads) else self.packed_tail
        return [i for i, tile in enumerate(self.tiles) if tile is not unused]

    @property
    def tiles(self) -> tuple[TileConfig, ...]:
        packed = (self.packed_tail,) if self.packed_tail else ()
        return (self.tail, *packed, *self.shared)

    @property
    def first_shared(self) -> int:
        """Index into `tiles` from which they are shared ones."""
        return len(self.tiles) - len(self.shared)

    @cached_property
    def block_m(self) -> np.ndarray:
        """Rows of each tile: int [tiles]."""
        return np.array([tile.block_m for tile in self.tiles])

    @cached_property
    def block_n(self) -> np.ndarray:
        """KV tokens of each tile: int [tiles]."""
        return np.array([tile.block_n for tile in self.tiles])


@dataclass(frozen=True)
class Tiling:
    """Jobs: one pack, or several short tails, that run as one tile.

    pack_order        int32 [P]    packs, those of a job together
    job_offset        int32 [J+1]  CSR offsets into pack_order
    tile              int32 [J]    index into TileSet.tiles
    row_tiles         int32 [J]    tiles that the job's queries are spread over ...
    queries_per_tile  int32 [J]    ... and how many go into each
    tokens            int32 [J]    KV tokens of the job, those of all its packs
    most_splits       int32 [J]    KV splits that the job allows
    step_share        float [J]    one CTA's time for the job and one KV head, relative to that of
                                   the step, were it spread evenly over all CTAs
    """

    pack_order: np.ndarray
    job_offset: np.ndarray
    tile: np.ndarray
    row_tiles: np.ndarray
    queries_per_tile: np.ndarray
    tokens: np.ndarray
    most_splits: np.ndarray
    step_share: np.ndarray


def tile_packs(packs: Packs, tile_set: TileSet, costs: CostModel) -> Tiling:
    """Pick a tile for every pack.

    Shared packs round up: the smallest block_m that holds the pack's queries * group_size rows, and
    the largest one, several times, for more. Short tails of like length share a tile, where enough
    of them remain to fill the GPU. What launching and merging cost anyway counts as time of the
    step: where that is most of it, splits would only add partial results.
    """
    queries = np.diff(packs.query_offset)
    kv_len = packs.kv_end - packs.kv_start
    shared = np.flatnonzero(packs.tail < 0)
    tails = np.flatnonzero(packs.tail >= 0)
    packed = tile_set.packed_tail
    short = np.empty(0, tails.dtype)
    is_short = kv_len[tails] <= tile_set.packed_len
    if tile_set.packs_tails(int(np.count_nonzero(is_short)), costs.num_kv_heads):
        tails, short = tails[~is_short], tails[is_short]
        short = short[np.argsort(-kv_len[short], kind="stable")]
    order = np.concatenate([shared, tails, short])
    singles = shared.size + tails.size
    step = packed.requests if packed else 1
    offset = np.concatenate(
        [np.arange(singles), np.arange(singles, order.size, step), [order.size]]
    )
    job_len = np.maximum.reduceat(kv_len[order], offset[:-1])
    shortest = np.minimum.reduceat(kv_len[order], offset[:-1])
    job_tokens = np.add.reduceat(kv_len[order], offset[:-1])
    job_queries = np.add.reduceat(queries[order], offset[:-1])

    first_shared = tile_set.first_shared
    tile = np.full(job_len.size, 1, np.int64)  # packed tails, unless overwritten
    tile[shared.size : singles] = 0
    row_tiles = np.ones(job_len.size, np.int64)
    per_tile = job_queries.copy()
    if shared.size:
        rows = tile_set.block_m[first_shared:]
        chosen = _select_shared(job_queries[: shared.size], rows, costs.group_size)
        tile[: shared.size] = chosen[0] + first_shared
        row_tiles[: shared.size], per_tile[: shared.size] = chosen[1:]

    ctas = tile_set.num_sms * np.array([t.fill for t in tile_set.tiles])[tile]
    # of the whole GPU, all heads
    per_token = np.maximum(costs.kv_token, tile_set.block_m[tile] * costs.mma_row)
    # one CTA's time for a job's whole KV and one head
    job_time = job_tokens * per_token / costs.num_kv_heads * ctas
    step = (row_tiles * costs.num_kv_heads * (job_time + costs.item) / ctas).sum()
    most_splits = np.minimum(-(-job_len // tile_set.min_split), -(-shortest // layout.SPLIT_UNIT))
    return Tiling(
        pack_order=order.astype(np.int32),
        job_offset=offset.astype(np.int32),
        tile=tile.astype(np.int32),
        row_tiles=row_tiles.astype(np.int32),
        queries_per_tile=per_tile.astype(np.int32),
        tokens=job_tokens.astype(np.int32),
        most_splits=most_splits.astype(np.int32),
        step_share=job_time / (step + costs.launch),
    )


def _select_shared(queries, block_m: np.ndarray, group: int):
    """Return (index into block_m, row tiles, queries per tile) of each shared pack."""
    most = block_m[-1] // group
    row_tiles = -(-queries // most)
    per_tile = -(-queries // row_tiles)
    row_tiles = -(-queries // per_tile)
    tile = np.searchsorted(block_m, per_tile * group)  # the smallest block_m with enough rows
    return tile, row_tiles, per_tile
