"""What one decode step will do, prepared on the host before its forward pass.

    requests + tree -> lifetime -> paths -> predicted times, plan -> policy -> Step

Imports nothing of SGLang and touches no device: the backend executes the Step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.metrics.step_count import StepCount
from sgl_prefix_attn.paths.radix import (
    TreeInvariantError,
    check_paths,
    read_paths,
    remaps,
    unsupported_tree,
)
from sgl_prefix_attn.predict.predictor import Predictor, outlook
from sgl_prefix_attn.records import PREFIX, Decision, Plan, PlanTooLarge
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.plan_lifetime import PlanLifetime
from sgl_prefix_attn.step.policy import STOCK_STEPS, BatchFacts, decide


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
    predictor     times of both kernels, or None: then prefix kernels run wherever they can
    graph_problem why a batch of so many requests has no prefix graph, or None
    padded_size   rows of the graph that a batch of so many requests replays
    model_problem why no step can run prefix kernels (policy.unsupported_model), or None
    agree         whether all tensor-parallel ranks pass True; every rank calls it at the same steps
    """

    def __init__(
        self,
        settings: Settings,
        planner,
        fits: Callable[[Plan], bool],
        counters: StepCounters,
        *,
        predictor: Predictor | None = None,
        graph_problem: Callable[[int], str | None] = lambda batch_size: None,
        padded_size: Callable[[int], int] = lambda batch_size: batch_size,
        model_problem: str | None = None,
        agree: Callable[[bool], bool] = lambda ok: ok,
    ):
        self.settings = settings
        self._counters = counters
        # Of the last look at the batch: until it is stale its decision and its plan stand.
        self.lifetime = PlanLifetime()
        self._count = StepCount(counters)
        self._planner = planner
        self._fits = fits
        self._predictor = predictor
        self._graph_problem = graph_problem
        self._padded_size = padded_size
        self._model_problem = model_problem
        self._agree = agree
        self._standing: dict[tuple, tuple[BatchFacts, Decision]] = {}
        self._looked: Decision | None = None  # what the last look decided
        # What a look gave to stock kernels, and for how many steps before there is another.
        self._stock: Decision | None = None
        self._stock_steps_left = 0
        self._running: str | None = None  # variant of the last step ...
        self._steps = 0  # ... and for how many steps without a break
        self._prefix_steps = 0
        self._plain: Step | None = None  # the last one without a plan

    def prepare(
        self, reqs: Sequence, tree_cache, seq_lens: np.ndarray, req_to_token: torch.Tensor
    ) -> Step:
        """The step about to run: reqs in batch order, seq_lens int [B] with its token included."""
        self._count.start(reqs)
        facts, decision = self._standing_facts(tree_cache, len(reqs))
        plan, known = None, False
        if decision.variant == PREFIX and self._stock_steps_left > 0 and not self.settings.check:
            self._stock_steps_left -= 1
            self.lifetime.stepped()
            decision = self._stock
        elif decision.variant == PREFIX:
            decision, plan = self._look_if_stale(facts, reqs, tree_cache, seq_lens, req_to_token)
            known = decision is self._looked
            if decision.variant != PREFIX:
                self._stock, self._stock_steps_left = decision, STOCK_STEPS - 1
        self._steps = self._steps + 1 if self._running == decision.variant else 1
        self._running = decision.variant
        if known:
            self._count.known(decision, len(reqs))
        else:
            self._count.unread(decision, seq_lens)
        if decision.variant != PREFIX:
            self._tell_once(decision)
            return self._plain_step(decision)
        self._prefix_steps += 1
        check = self.settings.check and self._prefix_steps % self.settings.check_every == 0
        if check:
            self._count.interrupt()
        elif plan is None:
            return self._plain_step(decision)
        return Step(decision, plan, cross_check=check)

    def _plain_step(self, decision: Decision) -> Step:
        """Kept for as long as the decision stands: making a record takes microseconds."""
        if self._plain is None or self._plain.decision is not decision:
            self._plain = Step(decision)
        return self._plain

    @property
    def counters(self) -> StepCounters:
        """What the steps so far were counted into."""
        self._count.flush()
        return self._counters

    def interrupt(self) -> None:
        """A forward pass that is no step of this preparer runs."""
        self._count.interrupt()

    def only_stock(self, reason: str) -> None:
        """No step from now on can run prefix kernels."""
        self._model_problem = reason

    def _standing_facts(self, tree_cache, batch_size: int) -> tuple[BatchFacts, Decision]:
        """What is known without looking at the batch, and the decision that it makes."""
        graph = self._graph_problem(batch_size)
        key = (type(tree_cache), self.settings.policy, self._model_problem, graph)
        if key not in self._standing:
            facts = BatchFacts(
                policy=self.settings.policy,
                model=self._model_problem,
                tree=unsupported_tree(tree_cache),
                graph=graph,
                strategy=self.settings.strategy,
            )
            self._standing[key] = (facts, decide(facts))
        return self._standing[key]

    def _look_if_stale(
        self, facts: BatchFacts, reqs, tree_cache, seq_lens, req_to_token
    ) -> tuple[Decision, Plan | None]:
        """Decision of this step, with a plan where a new one is needed."""
        plan, fault, cause = None, None, None
        try:
            if self.settings.check:
                check_paths(read_paths(reqs, tree_cache, seq_lens), reqs, tree_cache, req_to_token)
            cause = self.lifetime.stale(reqs, seq_lens, remaps(tree_cache))
            if cause is not None:
                # Until the look has succeeded there is none: a failed try must look again.
                self.lifetime.invalidate(cause)
                with self._counters.look():
                    self._looked, plan = self._look(facts, cause, reqs, tree_cache, seq_lens)
        except Exception as error:
            fault = error
        # Ranks share requests, lengths and calibration, so they get here at the same steps.
        if cause is not None or fault is not None or self.settings.check:
            if not self._agree(fault is None):
                self.lifetime.invalidate("fault")
                return decide(replace(facts, fault=self._reason_of(fault))), None
        self.lifetime.stepped()
        return self._looked, plan

    def _look(
        self, facts: BatchFacts, cause: str, reqs, tree_cache, seq_lens
    ) -> tuple[Decision, Plan | None]:
        """Read the tree, predict, and plan unless no plan could win."""
        paths = read_paths(reqs, tree_cache, seq_lens)
        if self._predictor is not None and facts.policy != PREFIX:
            seen = outlook(self._predictor, paths, self._padded_size(len(reqs)))
            facts = replace(
                facts,
                predicted=seen.predicted,
                source=self._predictor.source,
                shares=seen.shares,
                running=self._running,
                steps=self._steps,
            )
            decision = decide(facts)
            if decision.variant != PREFIX:
                self._stay_stock(reqs, seq_lens, seen.unique_tokens)
                return decision, None
        plan = self._planner.plan(paths)
        self._counters.plan(cause, plan.stats)
        if facts.predicted is not None:
            us = self._predictor.prefix(plan.work)
            facts = replace(facts, predicted=replace(facts.predicted, prefix_us=us))
        decision = decide(facts)
        if decision.variant != PREFIX:
            self._stay_stock(reqs, seq_lens, plan.stats.kv_tokens_unique)
            return decision, None
        if not self._fits(plan):
            raise PlanTooLarge(
                f"{plan.words.size} words, {plan.num_index_slots} index slots and "
                f"{plan.num_partials} partial rows do not fit the workspace"
            )
        self.lifetime.planned(reqs, seq_lens, plan.appends_left)
        self._count.looked_prefix(plan.stats)
        return decision, plan

    def _stay_stock(self, reqs, seq_lens: np.ndarray, unique: int) -> None:
        """Stock kernels until the batch changes or has grown enough to be looked at again."""
        self.lifetime.planned(reqs, seq_lens, self.settings.headroom)
        self._count.looked_stock(seq_lens, unique)

    def _reason_of(self, fault: Exception | None) -> str:
        """Why a look failed, on this rank or (None) on another; logged the first time."""
        if fault is None:
            reason, fault = "other_rank", RuntimeError("another tensor-parallel rank failed")
        elif isinstance(fault, TreeInvariantError):
            reason = "check_failed"
        elif isinstance(fault, PlanTooLarge):
            reason = "plan_too_large"
        else:
            reason = "planner_error"
        self._counters.log_once(
            reason,
            logging.ERROR,
            "decode steps fall back to stock attention (%s): %s",
            reason,
            fault,
            exc_info=fault,
        )
        return reason

    def _tell_once(self, decision: Decision) -> None:
        self._counters.log_once(
            decision.reason,
            logging.INFO,
            "decode runs stock attention where the reason is %s",
            decision.reason,
        )
