"""What one decode step will do, prepared on the host before its forward pass.

    requests + tree -> policy -> lifetime -> paths -> plan -> Step

Imports nothing of SGLang and touches no device: the backend executes the Step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_prefix_attn.envs import Settings
from sgl_prefix_attn.executor import PlanTooLarge
from sgl_prefix_attn.lifetime import PlanLifetime
from sgl_prefix_attn.metrics import KvTokens, StepCounters
from sgl_prefix_attn.policy import PREFIX, BatchFacts, decide
from sgl_prefix_attn.records import Decision, Plan, PlanStats
from sgl_prefix_attn.tree import TreeInvariantError, check_paths, read_paths, unsupported_tree


@dataclass(frozen=True)
class Step:
    """One decode step.

    new_plan    to be loaded before the step, None to go on with the loaded one (or for stock)
    cross_check run both backends and compare them (SGL_PREFIX_ATTN_CHECK=1)
    """

    decision: Decision
    new_plan: Plan | None = None
    cross_check: bool = False

    @property
    def is_prefix(self) -> bool:
        return self.decision.variant == PREFIX


class StepPreparer:
    """Decides and plans decode steps; owns the plan's lifetime and the counters.

    planner       .plan(paths) -> Plan
    fits          whether the executor's workspace holds a plan
    graph_problem why a batch of so many requests has no prefix graph, or None
    model_problem why no step can run prefix kernels (policy.unsupported_model), or None
    raise_faults  raise planner errors instead of falling back: with tensor parallelism one rank
                  must not decide alone
    """

    def __init__(
        self,
        settings: Settings,
        planner,
        fits: Callable[[Plan], bool],
        counters: StepCounters,
        *,
        graph_problem: Callable[[int], str | None] = lambda batch_size: None,
        model_problem: str | None = None,
        raise_faults: bool = False,
    ):
        self.settings = settings
        self.counters = counters
        self.lifetime = PlanLifetime()
        self._planner = planner
        self._fits = fits
        self._graph_problem = graph_problem
        self._model_problem = model_problem
        self._raise_faults = raise_faults
        self._decisions: dict[tuple, Decision] = {}
        self._stats: PlanStats | None = None
        self._steps_since_plan = 0
        self._prefix_steps = 0

    def prepare(
        self, reqs: Sequence, tree_cache, seq_lens: np.ndarray, req_to_token: torch.Tensor
    ) -> Step:
        """The step about to run: reqs in batch order, seq_lens int [B] with its token included."""
        decision = self._decide(tree_cache, len(reqs))
        plan = None
        if decision.variant == PREFIX:
            try:
                plan = self._plan_if_stale(reqs, tree_cache, seq_lens, req_to_token)
            except Exception as error:
                decision = self._fault(tree_cache, error)
        if decision.variant != PREFIX:
            self._count_stock(decision, seq_lens)
            return Step(decision)
        self.lifetime.stepped()
        self._count_prefix(decision, len(reqs), fresh=plan is not None)
        self._prefix_steps += 1
        check = self.settings.check and self._prefix_steps % self.settings.check_every == 0
        return Step(decision, plan, cross_check=check)

    def only_stock(self, reason: str) -> None:
        """No step from now on can run prefix kernels."""
        self._model_problem = reason

    def _decide(self, tree_cache, batch_size: int) -> Decision:
        graph = self._graph_problem(batch_size)
        # All that a healthy step's decision depends on: decided once, not once a step.
        facts = (type(tree_cache), self.settings.policy, self._model_problem, graph)
        if facts not in self._decisions:
            self._decisions[facts] = decide(self._facts(tree_cache, graph=graph))
        return self._decisions[facts]

    def _facts(self, tree_cache, graph: str | None = None, fault: str | None = None) -> BatchFacts:
        return BatchFacts(
            policy=self.settings.policy,
            model=self._model_problem,
            tree=unsupported_tree(tree_cache),
            graph=graph,
            fault=fault,
        )

    def _plan_if_stale(self, reqs, tree_cache, seq_lens, req_to_token) -> Plan | None:
        if self.settings.check:
            check_paths(read_paths(reqs, tree_cache, seq_lens), reqs, tree_cache, req_to_token)
        cause = self.lifetime.stale(reqs, seq_lens)
        if cause is None:
            return None
        # Until the new plan is known to be good the step has none: a failed try must plan again.
        self.lifetime.invalidate(cause)
        start = time.perf_counter()
        plan = self._planner.plan(read_paths(reqs, tree_cache, seq_lens))
        self.counters.plan(cause, time.perf_counter() - start)
        if not self._fits(plan):
            raise PlanTooLarge(
                f"{plan.words.size} words, {plan.num_index_slots} index slots and "
                f"{plan.num_partials} partial rows do not fit the workspace"
            )
        self.lifetime.planned(reqs, seq_lens, plan.appends_left)
        self._stats = plan.stats
        return plan

    def _fault(self, tree_cache, error: Exception) -> Decision:
        if isinstance(error, TreeInvariantError):
            reason = "check_failed"
        elif isinstance(error, PlanTooLarge):
            reason = "plan_too_large"
        else:
            reason = "planner_error"
        # A workspace overflow follows from replicated inputs alone, so all ranks agree on it.
        if self._raise_faults and reason != "plan_too_large":
            raise error
        self.counters.log_once(
            reason,
            logging.ERROR,
            "decode steps fall back to stock attention (%s): %s",
            reason,
            error,
            exc_info=error,
        )
        return decide(self._facts(tree_cache, fault=reason))

    def _count_prefix(self, decision: Decision, batch_size: int, fresh: bool) -> None:
        self._steps_since_plan = 0 if fresh else self._steps_since_plan + 1
        # Since the plan every request has grown by one private token a step.
        grown = batch_size * self._steps_since_plan
        stats = self._stats
        self.counters.step(
            decision,
            KvTokens(
                read=stats.kv_tokens_read + grown,
                query_centric=stats.kv_tokens_query_centric + grown,
                unique=stats.kv_tokens_unique + grown,
            ),
        )

    def _count_stock(self, decision: Decision, seq_lens: np.ndarray) -> None:
        total = int(seq_lens.sum())
        self.counters.step(decision, KvTokens(read=total, query_centric=total, unique=0))
        self.counters.log_once(
            decision.reason,
            logging.INFO,
            "decode runs stock attention where the reason is %s",
            decision.reason,
        )
