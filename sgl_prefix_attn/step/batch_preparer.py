"""What every kind of batch is prepared by: its paths are read, planned, predicted and decided."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.paths.readers import reader_of
from sgl_prefix_attn.paths.tree_reader import RunningBatch, TreeInvariantError, check_paths
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import PREFIX, Decision, PathTable, PlanTooLarge
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.evaluate import Evaluation, TimePredictor, evaluate
from sgl_prefix_attn.step.policy import STOCK_STEPS, BatchFacts

_FAULTS: dict[type[Exception], str] = {
    TreeInvariantError: "check_failed",
    PlanTooLarge: "plan_too_large",
}


class BatchPreparer:
    """Decides and plans the batches of a kind, and counts them.

    planner     None where no batch can run prefix kernels
    predictor   of both kernels' times, None: plans run wherever they can (extend batches: wherever
                anything is shared)
    problem     why no batch can run a plan, or None
    agree       whether all tensor-parallel ranks pass True; every rank calls it at the same batches
    least_saving_us  per layer, from which a plan is worth making
    deterministic  whether results must not depend on the batch, which stock kernels do not promise
    """

    _kind: str  # of the batches, for the log

    def __init__(
        self,
        settings: Settings,
        planner: Planner | None,
        counters: StepCounters,
        *,
        predictor: TimePredictor | None = None,
        problem: str | None = None,
        agree: Callable[[bool], bool] = lambda ok: ok,
        least_saving_us: float = 0.0,
        deterministic: bool = False,
    ):
        self.settings = settings
        self.counters = counters
        # The last batch was to run a plan, so the next one must have exact lengths; the same on all
        # ranks.
        self.needs_lengths = False
        self._planner: Any = planner
        self._predictor = predictor
        self.problem = problem
        self._agree = agree
        self._least_saving_us = least_saving_us
        self._deterministic = deterministic
        # A decision for stock kernels, and for how many more batches it stands without a look.
        self._standing: tuple[Decision | None, int] = None, 0
        self._prefix_batches = 0

    def only_stock(self, reason: str) -> None:
        """Let no batch from now on run a plan."""
        self.problem, self.needs_lengths = reason, False

    def _keep(self, decision: Decision) -> None:
        """Spare the next STOCK_STEPS - 1 batches a look after one that gave stock kernels; in check
        mode (PREFIX_ATTN_CHECK) every batch is looked at."""
        self._standing = decision, 0 if self.settings.check else STOCK_STEPS - 1

    def _take(self) -> Decision | None:
        """Return the decision that stands for a batch, None where a look is due."""
        decision, left = self._standing
        if left == 0:
            return None
        self._standing = decision, left - 1
        return decision

    def _read(self, batch: RunningBatch) -> PathTable:
        """Read a batch's paths; raise TreeInvariantError in check mode (PREFIX_ATTN_CHECK) where
        they are not those of SGLang's slots."""
        # There is one: without, the batch would not be looked at.
        reader: Any = reader_of(batch.tree_cache)
        paths = reader.read_paths(batch)
        if self.settings.check:
            check_paths(paths, batch, reader)
        return paths

    def _look(
        self,
        paths: PathTable,
        facts: BatchFacts,
        graph_rows: int = 0,
        query_lens: np.ndarray | None = None,
        before: Plan | None = None,
    ) -> Evaluation:
        """Evaluate a batch as evaluate(); raise PlanTooLarge where its plan is to run and does not
        fit."""
        done = evaluate(
            paths, facts, self._planner, self._predictor, graph_rows, query_lens, before
        )
        if done.decision.variant == PREFIX:
            self._planner.capacity.check(done.plan)
        return done

    def _say_stock(self, reason: str) -> None:
        """Log why batches run stock kernels, once for each reason: where they must be
        deterministic, as an error."""
        level, means = logging.INFO, ""
        if self._deterministic:
            level, means = logging.ERROR, ", and are not deterministic"
        said = "%s run stock attention where the reason is %s%s"
        key = f"{self._kind} run stock: {reason}"
        self.counters.log_once(key, level, said, self._kind, reason, means)

    def _is_checked(self) -> bool:
        """Count a batch that runs prefix kernels; tell whether stock ones are to run beside them,
        and results be compared."""
        self._prefix_batches += 1
        return self.settings.check and self._prefix_batches % self.settings.check_every == 0

    def _reason_of(self, fault: Exception | None, reason: str | None = None) -> str:
        """Name what went wrong here, or (None) on another rank, as a label of metrics; log it the
        first time."""
        if reason is None:
            reason = "other_rank" if fault is None else _FAULTS.get(type(fault), "planner_error")
        fault = fault or RuntimeError("another tensor-parallel rank failed")
        self.counters.log_once(
            f"{self._kind}: {reason}",
            logging.ERROR,
            "%s fall back to stock attention (%s): %s",
            self._kind,
            reason,
            fault,
            exc_info=fault,
        )
        return reason
