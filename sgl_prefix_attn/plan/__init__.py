"""The planner: forest -> packing -> packs -> tiles -> KV splits -> work queue."""

from sgl_prefix_attn.plan.balance import share_within
from sgl_prefix_attn.plan.capacity import UNLIMITED, Capacity
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.packs import make_packs
from sgl_prefix_attn.plan.profit import STRATEGIES, choose_packing
from sgl_prefix_attn.plan.splits import split_jobs
from sgl_prefix_attn.plan.tiles import TileConfig, TileSet, tile_packs
from sgl_prefix_attn.plan.workqueue import serialize
from sgl_prefix_attn.records import Forest, HeadConfig, PathTable, Plan

__all__ = ["STRATEGIES", "CostModel", "Planner", "TileConfig", "TileSet"]


class Planner:
    """Plans decode steps of one head configuration; holds no state between plans.

    A plan that would not fit `capacity` shares less, so that it needs fewer partial rows, and cuts
    long KV less. With Capacity.for_server every plan fits.

    Raises ValueError for an unknown strategy, or tiles too small for a group's query heads.
    """

    def __init__(
        self,
        heads: HeadConfig,
        *,
        tile_set: TileSet,
        strategy: str = "calibrated",
        costs: CostModel | None = None,
        headroom: int = 64,
        capacity: Capacity = UNLIMITED,
    ):
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}")
        tile_set.check_group(heads.group_size)
        self.heads = heads
        self.strategy = strategy
        self.tile_set = tile_set
        self.costs = costs or CostModel.for_gpu("other", heads)
        self.headroom = headroom
        self.capacity = capacity

    def plan(self, paths: PathTable) -> Plan:
        """Plan one decode step. Raises ValueError for paths that do not add up."""
        return self.plan_forest(build_forest(paths))

    def plan_forest(self, forest: Forest) -> Plan:
        """Plan one decode step from its shared nodes."""
        shared = share_within(forest, self.capacity.partials)
        plan = self._plan(forest, shared, self.strategy)
        if not self.capacity.covers(plan):
            # Too many index slots: merged nodes stand in several segments.
            plan = self._plan(forest, shared, "naive")
        return plan

    def _plan(self, forest: Forest, shared: Forest, strategy: str) -> Plan:
        """Plan the requests of `forest`, of which they share `shared`."""
        packs = make_packs(shared, choose_packing(shared, strategy, self.costs))
        tiling = tile_packs(packs, self.tile_set, self.costs)
        splits, work = split_jobs(packs, tiling, self.tile_set, self.costs, self.capacity.partials)
        return serialize(forest, packs, tiling, splits, work, headroom=self.headroom)

    def warm_up(self) -> None:
        """Compile the planner's loops (a few seconds the first time) before serving starts."""
        smallest = PathTable.smallest_shared()
        self.plan(smallest)
        share_within(build_forest(smallest), partials=0)
