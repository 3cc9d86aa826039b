"""This library: `prefix`, and `prefix:` with other kernels, strategies, cuts or parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.plan.tiles import Cut
from sgl_prefix_attn.records import CALIBRATED, Forest


class PlannedRunnable:
    """A Runnable of the kernels and the plan that a server with the plugin would choose, but for
    the options. Raises ValueError where a family of kernels cannot run, Unsupported for a step that
    no plan has grown to.

    kernels, strategy  as of a server's settings
    part_tokens        of aligned plans, else 0
    choose             returns the cut of a forest to plan by, which stays; None: the planner does
    change             makes of each plan the one that runs
    grown              steps that were before this one since the plan was made

    stats, facts: of the first plan
    """

    def __init__(
        self, case: Case, kernels: str = AUTO, strategy: str = CALIBRATED, part_tokens: int = 0,
        choose: Callable[[Planner, Forest], Cut] | None = None,
        change: Callable[[Plan], Plan] = lambda plan: plan, grown: int = 0,
    ):  # fmt: skip
        why_not = why_no_hopper(case.device, case.heads, case.dtype, case.kv_dtype)
        self.family = choose_family(kernels, strategy, why_not).name
        backend, self.planner = kernels_and_planner(
            self.family, case.heads, case.dtype, case.device, case.page_size, strategy,
            case.kv_dtype, part_tokens,
        )  # fmt: skip
        forest = _steps_ago(build_forest(case.paths, case.query_lens), grown)
        self._make = partial(self.planner.plan_forest, forest)
        if choose is not None:
            self._make = partial(self.planner.serialize, forest, choose(self.planner, forest))
        self._change = change
        plan = change(self._make())
        self.stats = plan.stats
        self.facts = {
            "num_items": plan.stats.num_items,
            "num_partials": plan.stats.num_partials,
            "kv_tokens_read": plan.stats.kv_tokens_read + grown * plan.batch_size,
            "predicted_us": None if grown or math.isnan(plan.predicted_us) else plan.predicted_us,
            "tiles": plan.stats.num_tiles,
            "family": self.family,
        }
        self._case, self._outs = case, case.new_out()
        self._grown = self._left = grown  # steps by which the plan has to grow, and still has to
        self._executor = PlanExecutor(backend, Capacity.for_plans(plan))
        self._rows = torch.arange(plan.batch_size, device=case.device)
        self._executor.load(plan, case.req_to_token, self._rows)

    def plan(self) -> None:
        self._executor.load(self._change(self._make()), self._case.req_to_token, self._rows)
        self._left = self._grown

    def run(self, layer: int) -> torch.Tensor:
        while self._left:
            self._left -= 1
            self._grow()
        case, out = self._case, self._outs[layer]
        k, v = case.k[layer], case.v[layer]
        self._executor.run(LayerParams(case.q, k, v, out, None, case.sm_scale, 0.0))
        return out

    def _grow(self) -> None:
        """Append the tokens of the step that so many others are left behind."""
        seq_lens = self._case.seq_lens - self._left
        newest = self._case.req_to_token.gather(1, seq_lens.long()[:, None] - 1)
        self._executor.append(seq_lens, newest[:, 0])


def _steps_ago(forest: Forest, steps: int) -> Forest:
    """Return what the forest of a decode step was some steps before. Raises Unsupported where a
    request had no token of its own then."""
    before = replace(forest, seq_lens=forest.seq_lens - steps)
    if steps and (before.seq_lens <= before.tail_start).any():
        raise Unsupported(f"a request has not grown by {steps} tokens")
    return before


class Server(Provider):
    needs_cuda = False

    def __init__(self, name: str = "prefix", **options: Any):
        super().__init__(name, "sgl_prefix_attn", partial(PlannedRunnable, **options))

    def prepare(self, case: Case) -> Runnable:
        if why_not := why_no_backend(case.device, case.heads, case.dtype, case.kv_dtype):
            raise Unsupported(f"a server runs stock kernels ({why_not})")
        return super().prepare(case)
