"""The planner of row tiles: forest -> leaves in order -> tiles -> parts -> words."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sgl_prefix_attn.jit import cached_njit
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
from sgl_prefix_attn.plan.row_tile_time import RowTileRates, part_costs, predict_us
from sgl_prefix_attn.plan.row_tile_words import RowTilePlan, serialize_row_tiles
from sgl_prefix_attn.plan.row_tiles import B_MASKED, Cut, RowTiles, make_tiles
from sgl_prefix_attn.records import Forest, HeadConfig, PathTable

# Blocks that a part of a split tile has at least: a shorter one is mostly fixed cost.
LEAST_BLOCKS = 2
# Cuts come widest first; one that takes so many times as long as the best before ends the search.
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
        blocks = math.inf
        for cut in sorted(self._promising(forest), key=lambda cut: cut.us):
            if cut.num_blocks < blocks:  # one that reads no less would not fit either
                plan = self.serialize(forest, cut)
                if self.capacity.covers(plan):
                    return plan
                too_large, blocks = too_large or plan, cut.num_blocks
        assert too_large is not None, "every step can be cut"
        return too_large

    def _promising(self, forest: Forest) -> list[Cut]:
        """The cuts up to where narrower tiles only read shared KV more often."""
        found: list[Cut] = []
        best = math.inf
        for cut in self.cuts(forest):
            if cut.us > HOPELESS * best:
                break
            found.append(cut)
            best = min(best, cut.us)
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
        leaves = order_leaves(forest)
        queries = leaves.request.size
        if queries == 0:
            nothing = make_tiles(forest, leaves, np.zeros(1, np.int32), self.heads.group_size)
            yield Cut(leaves, nothing, np.zeros(0, np.int64), np.zeros(0), self.rates.fixed)
            return
        most = W.queries_per_tile(self.heads.group_size)
        unique_tokens = forest.unique_tokens
        seen = set()
        while most >= 1:
            edges = [cut_evenly(queries, most), cut_at_roots(leaves.root, most)]
            if forest.query_lens is not None:
                edges.append(cut_at_requests(leaves.after, most))
            for edge in edges:
                if edge.tobytes() not in seen:
                    seen.add(edge.tobytes())
                    tiles = make_tiles(forest, leaves, edge, self.heads.group_size)
                    yield from self.split(unique_tokens, leaves, tiles)
            most //= 2

    def split(self, unique_tokens: int, leaves: LeafOrder, tiles: RowTiles) -> Iterator[Cut]:
        """The tiles as they are, and split until every CTA has a ticket."""
        costs = part_costs(tiles, self.heads, self.rates)
        parts = np.ones(costs.size, np.int64)

        def cut(parts: np.ndarray) -> Cut:
            us = predict_us(
                tiles, costs, parts, unique_tokens, self.heads, self.num_sms, self.rates
            )
            return Cut(leaves, tiles, parts, costs, us)

        yield cut(parts)
        tickets = costs.size * self.heads.num_kv_heads
        # merging waits for the slowest part: it pays only while no CTA has a second ticket
        room = self.num_sms // self.heads.num_kv_heads
        if tickets >= self.num_sms or costs.sum() == 0:
            return
        blocks = tiles.blocks[:, : B_MASKED + 1].sum(1)
        most_parts = np.maximum(1, blocks // LEAST_BLOCKS)
        for share in (1.0, 0.75, 0.5):
            wanted = parts_within(costs, max(costs.size, int(room * share)), most_parts)
            if wanted.max() > 1 and not np.array_equal(wanted, parts):
                parts = wanted
                yield cut(parts)


@cached_njit
def parts_within(costs: np.ndarray, budget: int, most: np.ndarray) -> np.ndarray:
    """Parts int [T] of tiles that cost so much, in all at most `budget`, or that and one for each
    tile whose share is less, and of each at most `most` int [T]: always one more for the tile whose
    parts are the heaviest."""
    parts = np.ones(costs.size, np.int64)
    if costs.size < budget:
        share = costs / costs.sum() * budget
        for i in range(costs.size):
            parts[i] = min(max(int(share[i]), 1), most[i])
    for _ in range(max(0, budget - parts.sum())):
        weight = costs / parts
        heaviest = weight.max()
        tile = np.where(parts < most, weight, -1.0).argmax()
        if parts[tile] >= most[tile] or weight[tile] < heaviest:
            break
        parts[tile] += 1
    return parts
