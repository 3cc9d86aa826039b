"""What one decode step will do, prepared on the host before its forward pass.

    running batch -> lifetime -> paths -> evaluate (forest, plan, predicted times, decision) -> Step

Imports nothing of SGLang and touches no device: the backend executes the Step.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.metrics.step_count import StepCount
from sgl_prefix_attn.paths.readers import reader_of, unsupported_tree
from sgl_prefix_attn.paths.tree_reader import RunningBatch, TreeInvariantError, check_paths
from sgl_prefix_attn.records import PREFIX, STOCK, Decision, PlanTooLarge, StepPlan
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.decision_dump import DecisionDump
from sgl_prefix_attn.step.evaluate import StepPlanner, TimePredictor, evaluate
from sgl_prefix_attn.step.plan_lifetime import PlanLifetime
from sgl_prefix_attn.step.policy import LENGTHS_AWAITED, BatchFacts, decide
from sgl_prefix_attn.step.standing_stock import StandingStock

_UNDECIDED = Decision(STOCK, "no_batch")
_FAULTS: dict[type[Exception], str] = {
    TreeInvariantError: "check_failed",
    PlanTooLarge: "plan_too_large",
}


class Step(NamedTuple):
    """One decode step.

    new_plan    to be loaded before the step, None to go on with the loaded one (or for stock)
    cross_check run both backends and compare them (SGL_PREFIX_ATTN_CHECK=1)
    """

    decision: Decision
    new_plan: StepPlan | None = None
    cross_check: bool = False

    @property
    def is_prefix(self) -> bool:
        return self.decision.variant == PREFIX


class StepPreparer:
    """Decides and plans decode steps; owns the plan's lifetime and the counters.

    planner       None where no step of the model can run prefix kernels
    check_size    raises PlanTooLarge for a plan that the executor's workspace does not hold
    predictor     times of both kernels, or None: then prefix kernels run wherever they can
    graph_problem why a batch of so many requests has no prefix graph, or None
    padded_size   rows of the graph that a batch of so many requests replays
    model_problem why no step can run prefix kernels (model_facts.unsupported_model), or None
    agree         whether all tensor-parallel ranks pass True; every rank calls it at the same steps
    kind          of the steps, for the log
    least_saving_us  per layer, from which a plan is worth making
    """

    def __init__(
        self,
        settings: Settings,
        planner: StepPlanner | None,
        check_size: Callable[[StepPlan], None],
        counters: StepCounters,
        *,
        predictor: TimePredictor | None = None,
        graph_problem: Callable[[int], str | None] = lambda batch_size: None,
        padded_size: Callable[[int], int] = lambda batch_size: batch_size,
        model_problem: str | None = None,
        agree: Callable[[bool], bool] = lambda ok: ok,
        kind: str = "decode",
        least_saving_us: float = 0.0,
    ):
        self.settings = settings
        self.counters = counters
        # Of the last evaluation: until it is stale its decision and its plan stand.
        self.lifetime = PlanLifetime()
        self._count = StepCount(counters)
        self._dump = DecisionDump(settings.dump, settings.dump_every, counters)
        self._planner: Any = planner
        self._check_size = check_size
        self._predictor = predictor
        self._graph_problem = graph_problem
        self._padded_size = padded_size
        self._model_problem = model_problem
        self._agree = agree
        self._kind = kind
        self._least_saving_us = least_saving_us
        self._standing: dict[tuple, tuple[BatchFacts, Decision]] = {}
        self._evaluated = _UNDECIDED  # the last evaluation's
        self._stock = StandingStock(settings)
        self._running: str | None = None  # variant of the last step ...
        self._steps = 0  # ... and for how many steps without a break
        self._prefix_steps = 0
        # The last step was to run a plan, so the next one must have exact lengths; the same on all
        # ranks.
        self.needs_lengths = False

    def prepare(self, batch: RunningBatch) -> Step:
        """Prepare the step about to run."""
        self._count.start(batch.reqs)
        size = len(batch.reqs)
        facts, decision = self._standing_facts(batch.tree_cache, size)
        plan, known = None, False
        standing = self._stock.take() if decision.variant == PREFIX else None
        if standing is not None:
            self.lifetime.stepped()
            decision = standing
        elif decision.variant == PREFIX:
            decision, plan = self._evaluate_if_stale(facts, batch)
            known = decision is self._evaluated
            if decision.variant != PREFIX:
                self._stock.keep(decision)
        self.needs_lengths = decision.variant == PREFIX
        if self.needs_lengths and not batch.is_exact:
            self.lifetime.invalidate("lengths")  # the plan is not loaded
            self._count.unread(LENGTHS_AWAITED, batch.seq_lens)
            return Step(LENGTHS_AWAITED)
        self._steps = self._steps + 1 if self._running == decision.variant else 1
        self._running = decision.variant
        if known:
            self._count.known(decision, size)
        else:
            self._count.unread(decision, batch.seq_lens)
        if decision.variant != PREFIX:
            self.counters.log_once(
                decision.reason,
                logging.INFO,
                "%s steps run stock attention where the reason is %s",
                self._kind,
                decision.reason,
            )
            return Step(decision)
        self._prefix_steps += 1
        check = self.settings.check and self._prefix_steps % self.settings.check_every == 0
        if check:
            self._count.interrupt()
        return Step(decision, plan, cross_check=check)

    def pass_over(self) -> Decision | None:
        """Return the decision for stock kernels of a step that is neither looked at nor counted,
        because one before it was; None for a step to prepare."""
        standing = self._stock.take()
        if standing is not None:
            self._steps += 1
        return standing

    def lengths_jumped(self, seq_lens: np.ndarray) -> None:
        """Note that each request of the batch has grown by several tokens since its last step: a
        plan did not get them, but a decision for stock kernels stands."""
        if self._evaluated.variant == PREFIX:
            self.lifetime.invalidate("lengths")
        else:
            self.lifetime.jumped(seq_lens)

    def interrupt(self) -> None:
        """Note that a forward pass runs that is no step of this preparer."""
        self._count.interrupt()

    def only_stock(self, reason: str) -> None:
        """Let no step from now on run prefix kernels."""
        self._model_problem, self.needs_lengths = reason, False

    def _standing_facts(self, tree_cache, batch_size: int) -> tuple[BatchFacts, Decision]:
        """Return what is known without reading the batch, and the decision that it makes."""
        graph = self._graph_problem(batch_size)
        key = (type(tree_cache), self.settings.policy, self._model_problem, graph)
        if key not in self._standing:
            facts = BatchFacts(
                policy=self.settings.policy,
                model=self._model_problem,
                tree=unsupported_tree(tree_cache),
                graph=graph,
                least_saving_us=self._least_saving_us,
                strategy=self.settings.strategy,
            )
            self._standing[key] = (facts, decide(facts))
        return self._standing[key]

    def _evaluate_if_stale(
        self, facts: BatchFacts, batch: RunningBatch
    ) -> tuple[Decision, StepPlan | None]:
        """Decision of this step, with a plan where a new one is needed."""
        plan, fault, cause = None, None, None
        # There is one: without, the facts have stopped the step before.
        reader: Any = reader_of(batch.tree_cache)
        try:
            if self.settings.check:
                check_paths(reader.read_paths(batch), batch, reader)
            cause = self.lifetime.stale(batch, reader)
            if cause is not None:
                # Until it has succeeded there is no plan: a failed try must be tried again.
                self.lifetime.invalidate(cause)
                with self.counters.evaluation():
                    plan = self._evaluate(facts, cause, batch, reader)
        except Exception as error:
            fault = error
        # Ranks share requests, lengths and calibration, so they get here at the same steps. So
        # does a fault before there is a cause: what is compared is the same on all of them.
        if cause is not None or fault is not None or self.settings.check:
            if not self._agree(fault is None):
                self.lifetime.invalidate("fault")
                return decide(replace(facts, fault=self._reason_of(fault))), None
        self.lifetime.stepped()
        return self._evaluated, plan

    def _evaluate(
        self, facts: BatchFacts, cause: str, batch: RunningBatch, reader
    ) -> StepPlan | None:
        """Read the tree and decide; the plan to load, None for stock kernels."""
        paths = reader.read_paths(batch)
        done = evaluate(
            paths,
            replace(facts, running=self._running, steps=self._steps),
            self._planner,
            self._predictor,
            self._padded_size(len(batch.reqs)),
        )
        plan, is_prefix = done.plan, done.decision.variant == PREFIX
        if is_prefix:
            self._check_size(plan)
        self.counters.plan(cause, plan.stats)
        # A decision for stock kernels stands until the batch changes or has grown by the headroom.
        appends_left = plan.appends_left if is_prefix else self.settings.headroom
        self.lifetime.planned(batch, reader, appends_left)
        self._count.evaluated(plan.stats, done.decision.variant)
        self._evaluated = done.decision
        self._dump.decided(paths, done.decision)
        return plan if is_prefix else None

    def _reason_of(self, fault: Exception | None) -> str:
        """Say why an evaluation failed, here or (None) on another rank; log it the first time."""
        reason = "other_rank" if fault is None else reason_of(fault)
        fault = fault or RuntimeError("another tensor-parallel rank failed")
        self.counters.log_once(
            reason,
            logging.ERROR,
            "%s steps fall back to stock attention (%s): %s",
            self._kind,
            reason,
            fault,
            exc_info=fault,
        )
        return reason


def reason_of(fault: Exception) -> str:
    """Name what went wrong while a batch was planned, as a label of metrics."""
    return _FAULTS.get(type(fault), "planner_error")
