"""This library: `prefix`, and `prefix:` with other kernels, strategies, cuts or parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Provider, Runnable, Unsupported
from sgl_prefix_attn.api.families import kernels_and_planner
from sgl_prefix_attn.execute.backends.choice import why_no_backend, why_no_hopper
from sgl_prefix_attn.execute.backends.family import AUTO, choose_family
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.plan.serialize import Plan
from sgl_prefix_attn.plan.tiles import Cut
from sgl_prefix_attn.records import CALIBRATED, Forest


class PlannedRunnable:
    """A Runnable of the kernels and the plan that a server with the plugin would choose, but for
    the options. Raises ValueError where a family of kernels cannot run.

    kernels, strategy  as of a server's settings
    part_tokens        of aligned plans, else 0
    choose             returns the cut of a forest to plan by, which stays; None: the planner does
    change             makes of each plan the one that runs

    stats, facts: of the first plan
    """

    def __init__(
        self, case: Case, kernels: str = AUTO, strategy: str = CALIBRATED, part_tokens: int = 0,
        choose: Callable[[Planner, Forest], Cut] | None = None,
        change: Callable[[Plan], Plan] = lambda plan: plan,
    ):  # fmt: skip
        why_not = why_no_hopper(case.device, case.heads, case.dtype, case.kv_dtype)
        self.family = choose_family(kernels, strategy, why_not).name
        backend, self.planner = kernels_and_planner(
            self.family, case.heads, case.dtype, case.device, case.page_size, strategy,
            case.kv_dtype, part_tokens,
        )  # fmt: skip
        forest = build_forest(case.paths, case.query_lens)
        self._make = partial(self.planner.plan_forest, forest)
        if choose is not None:
            self._make = partial(self.planner.serialize, forest, choose(self.planner, forest))
        self._change = change
        plan = change(self._make())
        self.stats = plan.stats
        self.facts = {
            "num_items": plan.stats.num_items,
            "num_partials": plan.stats.num_partials,
            "kv_tokens_read": plan.stats.kv_tokens_read,
            "predicted_us": None if math.isnan(plan.predicted_us) else plan.predicted_us,
            "tiles": plan.stats.num_tiles,
            "family": self.family,
        }
        self._case, self._outs = case, case.new_out()
        self._executor = PlanExecutor(backend, Capacity.for_plans(plan))
        self._rows = torch.arange(plan.batch_size, device=case.device)
        self._executor.load(plan, case.req_to_token, self._rows)

    def plan(self) -> None:
        self._executor.load(self._change(self._make()), self._case.req_to_token, self._rows)

    def run(self, layer: int) -> torch.Tensor:
        case, out = self._case, self._outs[layer]
        k, v = case.k[layer], case.v[layer]
        self._executor.run(LayerParams(case.q, k, v, out, None, case.sm_scale, 0.0))
        return out


class Server(Provider):
    needs_cuda = False

    def __init__(self, name: str = "prefix", **options: Any):
        super().__init__(name, "sgl_prefix_attn", partial(PlannedRunnable, **options))

    def prepare(self, case: Case) -> Runnable:
        if why_not := why_no_backend(case.device, case.heads, case.dtype, case.kv_dtype):
            raise Unsupported(f"a server runs stock kernels ({why_not})")
        return super().prepare(case)
