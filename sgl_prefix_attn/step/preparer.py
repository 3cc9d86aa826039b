"""What one decode step will do, prepared on the host before its forward pass.

    running batch -> lifetime -> paths -> evaluate (forest, plan, predicted times, decision) -> Step

Imports nothing of SGLang and touches no device: the backend executes the Step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.metrics.step_count import StepCount
from sgl_prefix_attn.paths.readers import unsupported_tree
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import PREFIX, STOCK, Decision, PathTable
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.batch_preparer import BatchPreparer
from sgl_prefix_attn.step.decision_dump import DecisionDump
from sgl_prefix_attn.step.plan_lifetime import PlanLifetime
from sgl_prefix_attn.step.policy import LENGTHS_AWAITED, BatchFacts, decide

_UNDECIDED = Decision(STOCK, "no_batch")


class Step(NamedTuple):
    """One batch.

    new_plan    to be loaded before the step, None to go on with the loaded one (or for stock)
    cross_check run both backends and compare them (PREFIX_ATTN_CHECK=1)
    rows        of q that it has, padding apart
    """

    decision: Decision
    new_plan: Plan | None = None
    cross_check: bool = False
    rows: int = 0

    @property
    def is_prefix(self) -> bool:
        return self.decision.variant == PREFIX


class StepPreparer(BatchPreparer):
    """Decides and plans decode steps; owns the plan's lifetime.

    graph_problem why a batch of so many requests has no prefix graph, or None
    padded_size   rows of the graph that a batch of so many requests replays
    shared        what every BatchPreparer takes
    """

    def __init__(
        self,
        settings: Settings,
        planner: Planner | None,
        counters: StepCounters,
        *,
        graph_problem: Callable[[int], str | None] = lambda batch_size: None,
        padded_size: Callable[[int], int] = lambda batch_size: batch_size,
        kind: str = "decode steps",
        **shared,
    ):
        super().__init__(settings, planner, counters, **shared)
        self._kind = kind
        # Of the last evaluation: until it is stale its decision and its plan stand.
        self.lifetime = PlanLifetime()
        self._evaluated = _UNDECIDED
        # of that evaluation
        self._paths: PathTable | None = None
        self._plan: Plan | None = None
        self._count = StepCount(counters)
        self._dump = DecisionDump(
            settings.dump, settings.dump_every, counters, aligned=self._deterministic
        )
        self._graph_problem = graph_problem
        self._padded_size = padded_size
        self._known: dict[tuple, tuple[BatchFacts, Decision]] = {}
        self._running: str | None = None  # variant of the last step ...
        self._steps = 0  # ... and for how many steps without a break

    def only_stock(self, reason: str) -> None:
        super().only_stock(reason)
        # It would keep the requests and nodes of the last plan for good.
        self.lifetime, self._paths, self._plan = PlanLifetime(), None, None

    def prepare(self, batch: RunningBatch) -> Step:
        """Prepare the step about to run."""
        self._count.start(batch.reqs)
        facts, decision = self._known_facts(batch)
        plan, is_compared = None, False
        if decision.variant == PREFIX:
            decision, plan, is_compared = self._decide(facts, batch)
        self.needs_lengths = decision.variant == PREFIX
        if self.needs_lengths and not batch.is_exact:
            self.lifetime.invalidate("lengths")  # the plan is not loaded
            self._count.step(LENGTHS_AWAITED, batch.seq_lens, is_compared=False)
            return Step(LENGTHS_AWAITED)
        self._steps = self._steps + 1 if self._running == decision.variant else 1
        self._running = decision.variant
        self._count.step(decision, batch.seq_lens, is_compared)
        if decision.variant != PREFIX:
            self._say_stock(decision.reason)
            return Step(decision)
        check = self._is_checked()
        if check:
            self._count.interrupt()
        return Step(decision, plan, check, len(batch.reqs))

    def pass_over(self) -> Decision | None:
        """Return the decision for stock kernels of a step that is neither looked at nor counted,
        because one before it was; None for a step to prepare."""
        standing = self._take()
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

    def _known_facts(self, batch: RunningBatch) -> tuple[BatchFacts, Decision]:
        """Return what is known without reading the batch, and the decision that it makes."""
        graph = self._graph_problem(len(batch.reqs))
        has_beams = len(batch.seq_lens) != len(batch.reqs)
        key = (type(batch.tree_cache), self.settings.policy, self.problem, graph, has_beams)
        if key not in self._known:
            facts = BatchFacts(
                policy=self.settings.policy,
                model=self.problem,
                # A beam has a row and KV slots of its own, which no request or node tells of.
                tree="beam_search" if has_beams else unsupported_tree(batch.tree_cache),
                graph=graph,
                least_saving_us=self._least_saving_us,
            )
            self._known[key] = (facts, decide(facts))
        return self._known[key]

    def _decide(self, facts: BatchFacts, batch: RunningBatch) -> tuple[Decision, Plan | None, bool]:
        """Decide a step that nothing known stands against: the decision, a plan where a new one is
        needed, and whether the batch was compared with the one evaluated last."""
        standing = self._take()
        if standing is not None:
            self.lifetime.stepped()
            return standing, None, False
        plan, fault, cause = None, None, None
        try:
            paths = self._read(batch) if self.settings.check else None
            cause = self.lifetime.stale(batch)
            if cause is not None:
                # Until it has succeeded there is no plan: a failed try must be tried again.
                self.lifetime.invalidate(cause)
                with self.counters.evaluation():
                    plan = self._evaluate(facts, cause, batch, paths)
        except Exception as error:
            fault = error
        decision = self._evaluated
        # Ranks share requests, lengths and calibration, so they get here at the same steps. So
        # does a fault before there is a cause: what is compared is the same on all of them.
        if cause is not None or fault is not None or self.settings.check:
            if not self._agree(fault is None):
                self.lifetime.invalidate("fault")
                plan, decision = None, Decision(STOCK, self._reason_of(fault))
        if decision is self._evaluated:
            self.lifetime.stepped()
        if decision.variant != PREFIX:
            self._keep(decision)
        return decision, plan, decision is self._evaluated

    def _evaluate(
        self, facts: BatchFacts, cause: str, batch: RunningBatch, paths: PathTable | None
    ) -> Plan | None:
        """Evaluate the batch, with its paths or None; return the plan to load, None for stock
        kernels."""
        known, before = (self._paths, self._plan) if cause == "headroom" else (None, None)
        self._paths = self._plan = None  # a try after one that fails reads them anew
        if paths is None and known is not None:
            # The same requests have grown on the same paths, which take long to read.
            paths = replace(known, seq_lens=batch.seq_lens.astype(np.int32))
        paths = paths or self._read(batch)
        facts = replace(facts, running=self._running, steps=self._steps)
        rows = self._padded_size(len(batch.reqs))
        plan, decision = self._look(paths, facts, rows, before=before)
        is_prefix = decision.variant == PREFIX
        self.counters.plan(cause, plan.stats)
        # A decision for stock kernels stands until the batch changes or has grown by the headroom.
        appends_left = plan.appends_left if is_prefix else self.settings.headroom
        self.lifetime.planned(batch, appends_left, has_grown=known is not None)
        self._count.evaluated(plan.stats, decision.variant)
        self._evaluated, self._paths, self._plan = decision, paths, plan
        self._dump.decided(paths, decision)
        return plan if is_prefix else None
