"""The planner of row tiles: forest -> leaves in order -> tiles -> parts -> words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import numpy as np

from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.plan.capacity import UNLIMITED, Capacity
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.query_rows import (
    LeafOrder,
    cut_at_requests,
    cut_at_roots,
    cut_evenly,
    order_leaves,
)
from sgl_prefix_attn.plan.row_tile_time import RowTileRates, ways_to_split
from sgl_prefix_attn.plan.row_tile_words import RowTilePlan, serialize_row_tiles
from sgl_prefix_attn.plan.row_tiles import Cut, RowTiles, make_tiles
from sgl_prefix_attn.records import Forest, HeadConfig, PathTable

# Tiles get narrower; a width at which every cut takes so many times as long as the best one before
# ends the search.
HOPELESS = 1.6


class RowTilePlanner:
    """Plans steps of one head configuration; holds no state between plans.

    Of several cuts it takes those whose plans fit `capacity`. A step whose requests have one query
    each may grow by `headroom` tokens; one with several serves one step.

    Raises ValueError for a group of more query heads than a tile has rows.
    """

    def __init__(
        self,
        heads: HeadConfig,
        *,
        num_sms: int,
        rates: RowTileRates | None = None,
        headroom: int = 64,
        capacity: Capacity = UNLIMITED,
    ):
        if heads.group_size > W.HALF_ROWS:
            raise ValueError(f"a tile has no room for {heads.group_size} query heads a KV head")
        if headroom < 0:
            raise ValueError(f"headroom must be >= 0 tokens, got {headroom}")
        if num_sms < 1:
            raise ValueError(f"num_sms must be at least 1, got {num_sms}")
        self.heads = heads
        self.num_sms = num_sms
        self.rates = rates or RowTileRates()
        self.headroom = headroom
        self.capacity = capacity

    @property
    def tile_queries(self) -> int:
        """Queries that fill a tile."""
        return W.queries_per_tile(self.heads.group_size)

    def plan(self, paths: PathTable, query_lens: np.ndarray | None = None) -> RowTilePlan:
        """Plan one step of as many queries a request (int32 [B], None: one, a decode step).

        Raises ValueError for paths that do not add up.
        """
        return self.plan_forest(build_forest(paths, query_lens))

    def plan_forest(self, forest: Forest) -> RowTilePlan:
        """Plan one step by the cut that is predicted to be fastest of those that fit; by the
        fastest of all, which is too large, where none does."""
        too_large: RowTilePlan | None = None
        blocks = 0
        for cut in sorted(self.promising(forest), key=lambda cut: cut.us):
            # one that reads no less than one that does not fit would not fit either
            if too_large is None or cut.num_blocks < blocks:
                plan = self.serialize(forest, cut)
                if self.capacity.covers(plan):
                    return plan
                too_large, blocks = too_large or plan, cut.num_blocks
        assert too_large is not None, "every step can be cut"
        return too_large

    def promising(self, forest: Forest) -> list[Cut]:
        """The cuts up to where narrower tiles only read shared KV more often: the search of
        plan_forest."""
        found: list[Cut] = []
        best = math.inf
        for cuts in self._cuts_by_width(forest):
            fastest = min(cut.us for cut in cuts)
            if fastest > HOPELESS * best:
                break
            found += cuts
            best = min(best, fastest)
        return found

    def warm_up(self) -> None:
        """Compile the planner's loops (some seconds the first time) before serving starts."""
        self.plan(PathTable.smallest_shared())
        self.plan(PathTable.smallest_shared(), np.ones(2, np.int32))

    def serialize(self, forest: Forest, cut: Cut) -> RowTilePlan:
        """The plan of one of a forest's cuts."""
        headroom = self.headroom if forest.query_lens is None else 0
        return serialize_row_tiles(forest, cut, self.heads.group_size, headroom)

    def cuts(self, forest: Forest) -> Iterator[Cut]:
        """Every cut that is worth predicting: tile widths by halves, cut evenly, at the roots or,
        where requests have several queries, between requests; whole or split until every CTA has
        a ticket."""
        return chain.from_iterable(self._cuts_by_width(forest))

    def _cuts_by_width(self, forest: Forest) -> Iterator[list[Cut]]:
        """The cuts of each width that has any of its own, widest first."""
        leaves = order_leaves(forest)
        queries = leaves.request.size
        if queries == 0:
            nothing = make_tiles(forest, leaves, np.zeros(1, np.int32), self.heads.group_size)
            yield [Cut(leaves, nothing, np.zeros(0, np.int64), np.zeros(0), self.rates.fixed)]
            return
        most = W.queries_per_tile(self.heads.group_size)
        unique_tokens = forest.unique_tokens
        seen = set()
        while most >= 1:
            edges = [cut_evenly(queries, most), cut_at_roots(leaves.root, most)]
            if forest.query_lens is not None:
                edges.append(cut_at_requests(leaves.after, most))
            cuts: list[Cut] = []
            for edge in edges:
                if edge.tobytes() not in seen:
                    seen.add(edge.tobytes())
                    tiles = make_tiles(forest, leaves, edge, self.heads.group_size)
                    cuts += self.split(unique_tokens, leaves, tiles)
            if cuts:
                yield cuts
            most //= 2

    def split(self, unique_tokens: int, leaves: LeafOrder, tiles: RowTiles) -> Iterator[Cut]:
        """The tiles as they are, and split until every CTA has a ticket."""
        costs, parts, us = ways_to_split(tiles, unique_tokens, self.heads, self.num_sms, self.rates)
        for way in range(us.size):
            yield Cut(leaves, tiles, parts[way], costs, float(us[way]))
