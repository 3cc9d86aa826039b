"""The planner: forest -> leaves in order -> tiles -> parts -> words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.aligned import AlignedCut, whole_below
from sgl_prefix_attn.plan.aligned_search import AlignedSearch
from sgl_prefix_attn.plan.aligned_words import serialize_aligned
from sgl_prefix_attn.plan.capacity import UNLIMITED, Capacity
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import KernelRates
from sgl_prefix_attn.plan.leaves import LeafOrder, order_leaves
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.profit import choose_packing
from sgl_prefix_attn.plan.search import Search
from sgl_prefix_attn.plan.serialize import serialize
from sgl_prefix_attn.plan.split_nodes import Division
from sgl_prefix_attn.plan.tiles import Cut
from sgl_prefix_attn.records import CALIBRATED, STRATEGIES, Forest, HeadConfig, PathTable

# Tiles get narrower; a width at which every cut takes so many times as long as the best one before
# ends the search.
HOPELESS = 1.6
# Tokens from which on a node is long: whether those are split off is tried.
LONG = (256, 1024, 4096)


class Planner:
    """Plans steps of one head configuration; holds no state between plans.

    num_sms: CTAs that the kernel has at once; tile_rows: rows of its tiles; splits_nodes: whether
    it merges results by query, so that nodes may be split off.

    strategy: `calibrated` takes the cut that is predicted to be fastest, whether it splits nodes or
    not; any other splits and merges each node as profit.py says.

    part_tokens: for aligned plans (aligned.py), by which a request's results do not depend on the
    others of its batch: KV positions of a part; 0: every plan is what is fastest.

    Of several cuts it takes those whose plans fit `capacity`. A step whose requests have one query
    each may grow by `headroom` tokens; one with several serves one step.

    Raises ValueError for a group of more query heads than a tile has rows, for an unknown strategy,
    for one that splits nodes where the kernel or an aligned plan cannot, and for other part_tokens
    than multiples of a block.
    """

    def __init__(
        self,
        heads: HeadConfig,
        *,
        num_sms: int,
        rates: KernelRates | None = None,
        headroom: int = 64,
        capacity: Capacity = UNLIMITED,
        tile_rows: int = W.TILE_ROWS,
        strategy: str = CALIBRATED,
        splits_nodes: bool = False,
        part_tokens: int = 0,
    ):
        if heads.group_size > tile_rows:
            raise ValueError(f"a tile has no room for {heads.group_size} query heads a KV head")
        if headroom < 0:
            raise ValueError(f"headroom must be >= 0 tokens, got {headroom}")
        if num_sms < 1:
            raise ValueError(f"num_sms must be at least 1, got {num_sms}")
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}")
        if strategy != CALIBRATED and not splits_nodes:
            raise ValueError(f"strategy {strategy}: these kernels know {CALIBRATED} alone")
        if part_tokens < 0 or part_tokens % W.BLOCK:
            raise ValueError(f"part_tokens must be a multiple of {W.BLOCK}, got {part_tokens}")
        if part_tokens and strategy != CALIBRATED:
            raise ValueError(f"strategy {strategy}: aligned plans have {CALIBRATED} alone")
        self.heads = heads
        self.num_sms = num_sms
        self.rates = rates or KernelRates()
        self.headroom = headroom
        self.capacity = capacity
        self.tile_rows = tile_rows
        self.strategy = strategy
        self.costs = CostModel.of(self.rates, heads, num_sms, tile_rows)
        self.splits_nodes = splits_nodes and not part_tokens
        self.part_tokens = part_tokens

    @property
    def tile_queries(self) -> int:
        """Count the queries that fill a tile."""
        return W.queries_per_tile(self.heads.group_size, self.tile_rows)

    def plan(self, paths: PathTable, query_lens: np.ndarray | None = None) -> Plan:
        """Plan one step of as many queries a request (int32 [B], None: one, a decode step).

        Raises ValueError for paths that do not add up.
        """
        return self.plan_forest(build_forest(paths, query_lens))

    def plan_forest(self, forest: Forest, before: Plan | None = None) -> Plan:
        """Plan one step by the cut that is predicted to be fastest of those that fit; by the
        fastest of all, which is too large, where none does.

        before: the plan that the same requests have outgrown. An aligned one that ended early, with
        a row's first part, leaves its tiles to this one if they will not get `headroom` steps old
        by it: many rows end so one by one, and a search takes longer than all the rest.
        """
        searches = list(self._searches(forest))
        search = searches[0]
        if before is not None and isinstance(search, AlignedSearch):
            age = before.tiles_age + before.appends_left + 1
            if age + search.headroom < self.headroom:
                cut = search.cut_at(before.edge, before.predicted_us)
                plan = replace(self.serialize(forest, cut), tiles_age=age)
                if self.capacity.covers(plan):
                    return plan
        found = [
            (candidate, search) for search in searches for candidate in search.candidates(HOPELESS)
        ]
        found.sort(key=lambda pair: pair[0].us)
        for candidate, search in found:
            if candidate.blocks * W.BLOCK <= self.capacity.index_slots:
                plan = self.serialize(forest, search.cut(candidate))
                if self.capacity.covers(plan):
                    return plan
        fastest, search = found[0]
        return self.serialize(forest, search.cut(fastest))

    def node_costs(self, forest: Forest, most: int) -> np.ndarray:
        """float [N, 2], of at most so many nodes: the predicted microseconds with all nodes merged,
        and with this one alone split off, each in its fastest cut."""
        leaves = order_leaves(forest)

        def fastest(division: Division) -> float:
            return min(cut.us for cut in self._search(forest, leaves, division).candidates())

        merged = fastest(Division.merged(forest))
        number = np.arange(forest.parent.size)
        nodes = (number == i for i in number[:most])
        split = [fastest(Division.of_nodes(forest, leaves, one)) for one in nodes]
        return np.array([(merged, us) for us in split]).reshape(-1, 2)

    def warm_up(self) -> None:
        """Compile the planner's loops (some seconds the first time) before serving starts."""
        paths = PathTable.of(parent=[-1], length=[16], leaf=[0, 0], seq_lens=[17, 18])
        for query_lens in (None, np.ones(2, np.int32)):
            forest = build_forest(paths, query_lens)
            self.plan_forest(forest)
            if self.splits_nodes:  # which no plan of so small a step may do
                leaves = order_leaves(forest)
                packing = choose_packing(forest, "naive", self.costs)
                for division in (
                    Division.of_packing(forest, leaves, packing),
                    Division.of_nodes(forest, leaves, np.ones(forest.parent.size, bool)),
                ):
                    search = self._search(forest, leaves, division)
                    for candidate in search.candidates():
                        self.serialize(forest, search.cut(candidate))

    def serialize(self, forest: Forest, cut: Cut) -> Plan:
        """Return the plan of one of a forest's cuts."""
        group = self.heads.group_size
        if isinstance(cut, AlignedCut):
            return serialize_aligned(forest, cut, group, self.tile_rows, self.part_tokens)
        return serialize(forest, cut, group, self._headroom(forest), self.tile_rows)

    def cuts(self, forest: Forest) -> Iterator[Cut]:
        """Every cut that is worth predicting, with all nodes merged or, where the kernel can, some
        of them split off."""
        for search in self._searches(forest):
            yield from map(search.cut, search.candidates())

    def _headroom(self, forest: Forest) -> int:
        return self.headroom if forest.query_lens is None else 0

    def _searches(self, forest: Forest) -> Iterator[Search | AlignedSearch]:
        if self.part_tokens:
            headroom = self._headroom(forest)
            # a row that begins to have several parts needs another plan
            left = whole_below(self.part_tokens) - 1 - forest.seq_lens
            leaves = order_leaves(forest, left < 0)
            yield AlignedSearch(
                forest, leaves, self.heads, self.num_sms, self.rates, self.tile_queries,
                self.part_tokens, int(left.min(where=left >= 0, initial=headroom)),
            )  # fmt: skip
            return
        leaves = order_leaves(forest)
        for division in self._divisions(forest, leaves):
            yield self._search(forest, leaves, division)

    def _search(self, forest: Forest, leaves: LeafOrder, division: Division) -> Search:
        return Search(
            forest, leaves, division, self.heads, self.num_sms, self.rates, self.tile_queries,
            # as a query-centric kernel: no request beside another
            most=1 if self.strategy == "query" else self.tile_queries,
        )  # fmt: skip

    def _divisions(self, forest: Forest, leaves: LeafOrder) -> Iterator[Division]:
        """What may be split off: what the strategy says; for `calibrated` nothing, or what the
        per-node optimum says, or long nodes of many queries."""
        if self.strategy != CALIBRATED:
            packing = choose_packing(forest, self.strategy, self.costs)
            yield Division.of_packing(forest, leaves, packing)
            return
        yield Division.merged(forest)
        if not self.splits_nodes or forest.parent.size == 0:
            return
        yield Division.of_packing(forest, leaves, choose_packing(forest, CALIBRATED, self.costs))
        length, queries = forest.end - forest.start, leaves.last - leaves.first
        seen = {np.zeros(length.size, bool).tobytes()}
        for tokens in LONG:
            for least in (2, self.tile_queries + 1):
                split = (length >= tokens) & (queries >= least)
                if split.tobytes() not in seen:
                    seen.add(split.tobytes())
                    yield Division.of_nodes(forest, leaves, split)
