"""The ablations by name: each makes what runs a layer, and says what that reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from eval.ablate import separate_merge
from eval.ablate.strategies import serialize_parts, strategy_cut
from eval.bench_kernel.case import Case
from sgl_prefix_attn.execute.backends import gluon_backend, triton_backend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.query_rows import cut_at_roots, cut_evenly, order_leaves
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tiles import B_MASKED, Cut, make_tiles
from sgl_prefix_attn.plan.tile_defaults import default_tile_set
from sgl_prefix_attn.predict.startup import default_costs, default_rates
from sgl_prefix_attn.records import Forest, PlanStats


@dataclass(frozen=True)
class Step:
    """One step that all ablations run; planner: of row tiles, without headroom."""

    case: Case
    forest: Forest
    planner: RowTilePlanner

    @classmethod
    def of(cls, case: Case, num_sms: int) -> Step:
        rates = default_rates(case.device, case.heads, case.dtype, case.page_size)
        planner = RowTilePlanner(case.heads, num_sms=num_sms, rates=rates, headroom=0)
        return cls(case, build_forest(case.tree.paths()), planner)

    def best(self) -> Cut:
        return min(self.planner.cuts(self.forest), key=lambda cut: cut.us)

    def best_whole(self) -> Cut:
        return min(
            (cut for cut in self.planner.cuts(self.forest) if cut.parts.max() == 1),
            key=lambda cut: cut.us,
        )


@dataclass(frozen=True)
class Prepared:
    """run(layer) returns a layer's output [B, Hq, D]; partial_bytes are written, and read again;
    predicted_us is None where nothing was predicted."""

    run: Callable[[int], torch.Tensor]
    stats: PlanStats
    partial_bytes: int
    predicted_us: float | None


def _prepare(step: Step, backend, plan, predicted_us: float | None) -> Prepared:
    case = step.case
    executor = PlanExecutor(backend, Capacity.for_plans(plan))
    executor.load(plan, case.req_to_token, torch.arange(plan.batch_size, device=case.device))
    out = torch.full_like(case.q, float("nan"))

    def run(layer: int) -> torch.Tensor:
        k, v = case.k[layer], case.v[layer]
        executor.run(LayerParams(case.q, k, v, case.seq_lens, out, None, case.sm_scale, 0.0))
        return out

    row_bytes = case.heads.num_qo_heads * (2 * case.heads.head_dim + 8)
    return Prepared(run, plan.stats, plan.stats.num_partials * row_bytes, predicted_us)


def _fused(step: Step, cut: Cut, **flags) -> Prepared:
    case = step.case
    backend = gluon_backend.GluonBackend(case.heads, case.dtype, case.device, **flags)
    return _prepare(step, backend, step.planner.serialize(step.forest, cut), cut.us)


def _separate(step: Step, cut: Cut, dynamic: bool = False) -> Prepared:
    case = step.case
    plan, merges = serialize_parts(step.forest, cut, case.heads.group_size)
    backend = separate_merge.SeparateMerge(case.heads, case.dtype, case.device, merges, dynamic)
    return _prepare(step, backend, plan, None)  # another launch is not predicted


def strategy(name: str, step: Step) -> Prepared:
    """Packs of a strategy; with the merge in the kernel where no request is in two tiles."""
    case = step.case
    costs = default_costs(case.device, case.heads, case.dtype)
    cut = strategy_cut(step.planner, step.forest, name, costs)
    once = cut.leaves.request.size == step.case.tree.batch_size
    return _fused(step, cut) if once else _separate(step, cut)


def fixed_tile(rows: int, step: Step) -> Prepared:
    """Tiles of up to so many rows, whatever is predicted."""
    leaves = order_leaves(step.forest)
    group = step.case.heads.group_size
    most = rows // group

    def cuts() -> Iterator[Cut]:
        for edge in (cut_evenly(leaves.request.size, most), cut_at_roots(leaves.root, most)):
            tiles = make_tiles(step.forest, leaves, edge, group)
            yield from step.planner.split(step.forest.unique_tokens, leaves, tiles)

    return _fused(step, min(cuts(), key=lambda cut: cut.us))


def mean_split(step: Step) -> Prepared:
    """PAT's rule (its section 6): what is longer than the mean is cut into parts that are not."""
    cut = step.best_whole()
    blocks = cut.tiles.blocks[:, : B_MASKED + 1].sum(1)
    parts = np.ceil(blocks / blocks.mean()).astype(np.int64)
    return replace(_fused(step, replace(cut, parts=parts)), predicted_us=None)


def packs(step: Step, **flags) -> Prepared:
    """The Triton kernels and their planner, as on other GPUs."""
    case = step.case
    tile_set = default_tile_set(case.device, case.heads)
    costs = default_costs(case.device, case.heads, case.dtype)
    plan = Planner(case.heads, tile_set=tile_set, costs=costs).plan_forest(step.forest)
    backend = triton_backend.TritonBackend(case.heads, tile_set, case.dtype, case.device, **flags)
    return _prepare(step, backend, plan, None)


ABLATIONS: dict[str, Callable[[Step], Prepared]] = {
    "calibrated": lambda step: _fused(step, step.best()),
    **{name: partial(strategy, name) for name in ("pat", "compute", "naive", "query")},
    "tile_128": partial(fixed_tile, W.TILE_ROWS),
    "tile_64": partial(fixed_tile, W.HALF_ROWS),
    "no_split": lambda step: _fused(step, step.best_whole()),
    "mean_split": mean_split,
    "separate_merge": lambda step: _separate(step, step.best()),
    "dynamic_queue": lambda step: _separate(step, step.best(), dynamic=True),
    "dependent_launch": lambda step: _fused(step, step.best(), pdl=True),
    "packs": packs,
    "packs_serial": partial(packs, parallel_tiles=False),
}
