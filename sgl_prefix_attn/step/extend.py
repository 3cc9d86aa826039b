"""What one extend or verify batch will do: several tokens a request through a plan, or stock.

A plan serves one batch, all layers of it; nothing is carried on to the next one. PackInfer's idea
of computing requests together that share a cached prefix, with row tiles as its groups.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from sgl_prefix_attn.metrics.counters import EXTENDED, StepCounters
from sgl_prefix_attn.paths.readers import reader_of, unsupported_tree
from sgl_prefix_attn.paths.tree_reader import RunningBatch, check_paths
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tile_words import RowTilePlan
from sgl_prefix_attn.records import PREFIX, STOCK, Decision, Forest, Prediction
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.policy import LENGTHS_AWAITED, compare
from sgl_prefix_attn.step.preparer import Step, reason_of
from sgl_prefix_attn.step.standing_stock import StandingStock

# Predicted stock time over ours from which a batch goes through a plan. The planner's time is up to
# 16 % short where arithmetic bounds tiles of 128 rows (eval/results/multi_token_h200.json).
GAIN = 1.20


class PrefillPredictor(Protocol):
    """Microseconds per layer of stock prefill (predict/prefill_time.py)."""

    def stock(self, seq_lens: np.ndarray, query_lens: np.ndarray, unique: int) -> float: ...


def decide_extend(
    policy: str,
    against: str | None,
    shares: bool,
    predicted: Prediction | None,
    least_saving_us: float = 0.0,
) -> Decision:
    """Choose the kernels of an extend batch: what stands against a plan first, then a forced
    policy, then whether anything is shared, then the predicted times (None on a CPU)."""
    if against is None and policy == STOCK:
        against = "forced"
    if against is not None:
        return Decision(STOCK, against)
    if policy == PREFIX:
        return Decision(PREFIX, "forced")
    if not shares:
        return Decision(STOCK, "unshared")
    if predicted is None:
        return Decision(PREFIX, "default")
    return Decision(*compare(predicted, GAIN, least_saving_us), predicted)


class ExtendPreparer:
    """Decides and plans extend batches, each by itself.

    check_size raises PlanTooLarge for a plan that the executor's workspace does not hold
    predictor  of stock prefill, None: plans run wherever anything is shared
    problem    why no batch can run a plan, or None
    least_saving_us  per layer, from which a plan is worth making
    agree      whether all tensor-parallel ranks pass True; every rank calls it for each batch that
               verifies: a decode graph of it must be of one variant on all of them. Other batches
               run eagerly, and their attention is local to a rank
    """

    def __init__(
        self,
        settings: Settings,
        planner: RowTilePlanner,
        check_size: Callable[[RowTilePlan], None],
        counters: StepCounters,
        *,
        predictor: PrefillPredictor | None = None,
        problem: str | None = None,
        least_saving_us: float = 0.0,
        agree: Callable[[bool], bool] = lambda ok: ok,
    ):
        self._settings = settings
        self._planner = planner
        self._check_size = check_size
        self._counters = counters
        self._predictor: Any = predictor
        self._predicts = predictor is not None and settings.policy != PREFIX
        self._problem = problem
        self._least_saving_us = least_saving_us
        self._agree = agree
        self._prefix_batches = 0
        self._stock = StandingStock(settings)  # of batches that verify
        # The last batch that verifies was to run a plan, so the next one must have exact lengths;
        # the same on all ranks.
        self.needs_lengths = False

    def prepare(
        self,
        batch: RunningBatch,
        query_lens: np.ndarray,
        against: str | None = None,
        verifies: bool = False,
    ) -> Step:
        """Prepare the batch about to run.

        query_lens  int32 [B]: new tokens of each request
        against     what else stands against a plan of this batch
        verifies    it verifies drafts
        """
        known, plan = self._known(batch, query_lens, against), None
        if known is not None:
            decision = known
        else:
            try:
                with self._counters.evaluation(EXTENDED):
                    decision, plan = self._look(batch, query_lens)
            except Exception as error:
                decision = self._fallback(reason_of(error), error)
        if verifies:
            self.needs_lengths = self._agree(plan is not None)
            if self.needs_lengths and not batch.is_exact:
                decision, plan = LENGTHS_AWAITED, None
            elif plan is not None and not self.needs_lengths:
                decision, plan = Decision(STOCK, "other_rank"), None
            if known is None and not self.needs_lengths:
                self._stock.keep(decision)
        self._counters.extend(decision)
        check = False
        if plan is not None and self._settings.check:
            self._prefix_batches += 1
            check = self._prefix_batches % self._settings.check_every == 0
        return Step(decision, plan, cross_check=check)

    def unreadable(self, error: Exception, verifies: bool) -> None:
        """Note that a batch runs stock attention because what it asks could not be told."""
        self._counters.extend(self._fallback("unknown_batch", error))
        if verifies:
            self.needs_lengths = self._agree(False)

    def pass_over(self) -> Decision | None:
        """Return the decision for stock kernels of a batch that verifies and is not looked at,
        because one before it was; None for a batch to prepare."""
        standing = self._stock.take()
        if standing is not None:
            self._agree(False)
            self._counters.extend(standing)
        return standing

    def only_stock(self, reason: str) -> None:
        """Let no batch from now on run a plan."""
        self._problem, self.needs_lengths = reason, False

    def _fallback(self, reason: str, error: Exception) -> Decision:
        self._counters.log_once(
            f"extend_{reason}",
            logging.ERROR,
            "extend batches fall back to stock attention (%s): %s",
            reason,
            error,
            exc_info=error,
        )
        return Decision(STOCK, reason)

    def _known(
        self, batch: RunningBatch, query_lens: np.ndarray, against: str | None
    ) -> Decision | None:
        """Decide without a look at the tree, where that can be."""
        against = self._problem or unsupported_tree(batch.tree_cache) or against
        if against is None and self._predicts and query_lens.mean() >= self._planner.tile_queries:
            against = "full_tiles"  # each request fills tiles alone; planning them takes longest
        if against is None and self._settings.policy != STOCK:
            return None
        return decide_extend(self._settings.policy, against, False, None)

    def _look(
        self, batch: RunningBatch, query_lens: np.ndarray
    ) -> tuple[Decision, RowTilePlan | None]:
        """Read the tree and decide; a plan where one runs."""
        policy, forest = self._settings.policy, self._read(batch, query_lens)
        shares = forest.parent.size > 0
        decision = decide_extend(policy, None, shares, None)
        if decision.variant == STOCK:
            return decision, None
        plan = self._planner.plan_forest(forest)
        if self._predicts:
            stock_us = self._predictor.stock(forest.seq_lens, query_lens, forest.unique_tokens)
            predicted = Prediction(stock_us, plan.predicted_us)
            decision = decide_extend(policy, None, shares, predicted, self._least_saving_us)
            if decision.variant == STOCK:
                return decision, None
        self._check_size(plan)
        return decision, plan

    def _read(self, batch: RunningBatch, query_lens: np.ndarray) -> Forest:
        reader = reader_of(batch.tree_cache)
        assert reader is not None, "the tree is supported"
        paths = reader.read_paths(batch)
        if self._settings.check:
            check_paths(paths, batch, reader)
        return build_forest(paths, query_lens)
