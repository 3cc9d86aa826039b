"""The plan of one step: what a planner makes, and kernels run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.tiles import Cut
from sgl_prefix_attn.records import Forest, PlanStats


@dataclass(frozen=True)
class Plan:
    """One step as tiles of requests, in the words that kernels read.

    words         int32 [...]  layout in kernels/words.py
    batch_size    requests
    num_blocks    blocks of slots and keys that the step needs, growth included
    num_partial_tiles  partial results of tile_rows rows for each KV head, and
    num_places    partial results of one query that are merged by query, that it needs
    group_size    query heads a KV head
    tile_rows     rows that a tile has room for
    longest       tokens of the longest segment, by which the fill kernel's grid is chosen
    appends_left  tokens that every request can grow
    edge          int32 [.]  places of leaves (leaves.py) between which its tiles stand
    tiles_age     steps since the search that found them
    predicted_us  microseconds per layer, at that search
    """

    words: np.ndarray
    batch_size: int
    num_blocks: int
    num_partial_tiles: int
    num_places: int
    group_size: int
    tile_rows: int
    longest: int
    appends_left: int
    stats: PlanStats
    edge: np.ndarray
    predicted_us: float
    tiles_age: int = 0

    @property
    def num_index_slots(self) -> int:
        """Count the entries of slots, and of keys."""
        return self.num_blocks * W.BLOCK

    @property
    def num_partials(self) -> int:
        """Partial rows of all query heads that hold the partial tiles and, behind them, places."""
        return places_of_tiles(self.num_partial_tiles, self.tile_rows, self.group_size) + (
            self.num_places
        )

    @property
    def num_items(self) -> int:
        return int(self.words[W.H_NUM_ITEMS])

    @property
    def items(self) -> np.ndarray:
        """View the ITEMs, int32 [num_items, words of one]."""
        size = W.item_words(self.group_size, self.tile_rows)
        return self.words[W.HEADER_WORDS :][: self.num_items * size].reshape(-1, size)


def plan_of(
    found: tuple, forest: Forest, cut: Cut, group_size: int, headroom: int, tile_rows: int
) -> Plan:
    """Make the plan of a step that is cut so; found: words, num_blocks, num_partial_tiles,
    num_places and longest of it."""
    words, num_blocks, num_partial_tiles, num_places, longest = found
    return Plan(
        words=words,
        batch_size=forest.tail_parent.size,
        num_blocks=num_blocks,
        num_partial_tiles=num_partial_tiles,
        num_places=num_places,
        group_size=group_size,
        tile_rows=tile_rows,
        longest=longest,
        appends_left=headroom,
        stats=cut.stats(forest),
        edge=cut.edge,
        predicted_us=cut.us,
    )


@cached_njit
def places_of_tiles(tiles, tile_rows, group):
    """Places that partial tiles take up."""
    return -(-tiles * tile_rows // group)
