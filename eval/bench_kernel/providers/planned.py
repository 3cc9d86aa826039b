"""This library: `prefix`, `prefix:KERNELS`, `prefix:STRATEGY` and `prefix:invariant`."""

from __future__ import annotations

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
from sgl_prefix_attn.records import CALIBRATED

# Of a plan's statistics, in the rows of the result file.
FACTS = ("num_items", "num_partials", "kv_tokens_read")


def kernels_of(
    case: Case, kernels: str = AUTO, strategy: str = CALIBRATED, part_tokens: int = 0
) -> tuple[str, Any, Planner]:
    """Return a family's name, what runs its plans and what plans; by default what a server with the
    plugin would run. part_tokens: of aligned plans, else 0. Raises ValueError where the family
    cannot run."""
    why_not = why_no_hopper(case.device, case.heads, case.dtype, case.kv_dtype)
    family = choose_family(kernels, strategy, why_not).name
    return family, *kernels_and_planner(
        family, case.heads, case.dtype, case.device, case.page_size, strategy, case.kv_dtype,
        part_tokens,
    )  # fmt: skip


class PlannedRunnable:
    """Runs the plans that `make` returns, each of the same shape; stats: of the first.

    facts: for the result file
    """

    def __init__(self, case: Case, backend: Any, make: Callable[[], Any]):
        self._case, self._make = case, make
        plan = make()
        self.stats = plan.stats
        self.facts: dict = {name: getattr(plan.stats, name) for name in FACTS}
        self.facts |= {"predicted_us": plan.predicted_us, "tiles": plan.stats.num_tiles}
        self._executor = PlanExecutor(backend, Capacity.for_plans(plan))
        self._rows = torch.arange(plan.batch_size, device=case.device)
        self._outs = case.new_out()
        self._load(plan)

    def plan(self) -> None:
        self._load(self._make())

    def _load(self, plan) -> None:
        self._executor.load(plan, self._case.req_to_token, self._rows)

    def run(self, layer: int) -> torch.Tensor:
        case, out = self._case, self._outs[layer]
        k, v = case.k[layer], case.v[layer]
        self._executor.run(LayerParams(case.q, k, v, case.seq_lens, out, None, case.sm_scale, 0.0))
        return out


class ServerRunnable(PlannedRunnable):
    """The kernels and the plan that a server would choose, but for options of kernels_of; family:
    their name."""

    def __init__(self, case: Case, **options: Any):
        self.family, backend, self.planner = kernels_of(case, **options)
        forest = build_forest(case.paths, case.query_lens)
        super().__init__(case, backend, lambda: self.planner.plan_forest(forest))
        self.facts["family"] = self.family


class Server(Provider):
    needs_cuda = False

    def __init__(self, name: str = "prefix", **options: Any):
        super().__init__(name, "sgl_prefix_attn", partial(ServerRunnable, **options))

    def prepare(self, case: Case) -> Runnable:
        if why_not := why_no_backend(case.device, case.heads, case.dtype, case.kv_dtype):
            raise Unsupported(f"a server runs stock kernels ({why_not})")
        return super().prepare(case)
