"""What one extend or verify batch will do: several tokens a request through a plan, or stock.

A plan serves one batch, all layers of it; nothing is carried on to the next one. PackInfer's idea
of computing requests together that share a cached prefix, with tiles of requests as its groups.
"""

import numpy as np

from sgl_prefix_attn.metrics.counters import EXTENDED
from sgl_prefix_attn.paths.readers import unsupported_tree
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.records import PREFIX, STOCK, Decision
from sgl_prefix_attn.step.batch_preparer import BatchPreparer
from sgl_prefix_attn.step.policy import LENGTHS_AWAITED, BatchFacts, decide
from sgl_prefix_attn.step.preparer import Step


class ExtendPreparer(BatchPreparer):
    """Decides and plans extend batches, each by itself. The ranks agree on those that verify: a
    decode graph of them must be of one variant on all ranks. Others run eagerly, and their
    attention is local to a rank.
    """

    _kind = "extend batches"

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
                with self.counters.evaluation(EXTENDED):
                    found = self._look(self._read(batch), self._facts(), query_lens=query_lens)
                decision, plan = found.decision, found.plan
            except Exception as error:
                decision = Decision(STOCK, self._reason_of(error))
            plan = plan if decision.variant == PREFIX else None
        if verifies:
            asks = self._asks_others(batch.tree_cache)
            self.needs_lengths = asks and self._agree(plan is not None)
            if self.needs_lengths and not batch.is_exact:
                decision, plan = LENGTHS_AWAITED, None
            elif plan is not None and not self.needs_lengths:
                decision, plan = Decision(STOCK, "other_rank"), None
            if asks and not self.needs_lengths:
                self._keep(decision)
        self.counters.extend(decision)
        if self._deterministic and decision.variant != PREFIX:
            self._say_stock(decision.reason)
        check = plan is not None and self._is_checked()
        return Step(decision, plan, check, int(query_lens.sum()))

    def unreadable(self, error: Exception, verifies: bool, tree_cache) -> None:
        """Note that a batch runs stock attention because what it asks could not be told."""
        decision = Decision(STOCK, self._reason_of(error, "unknown_batch"))
        self.counters.extend(decision)
        if verifies:
            self.needs_lengths = False
            if self._asks_others(tree_cache):
                self._agree(False)
                self._keep(decision)

    def pass_over(self) -> Decision | None:
        """Return the decision for stock kernels of a batch that verifies and is not looked at,
        because one before it was; None for a batch to prepare."""
        standing = self._take()
        if standing is not None:
            self.counters.extend(standing)
        return standing

    def _asks_others(self, tree_cache) -> bool:
        """Tell whether ranks vote on batches that verify: not where what all of them know rules
        plans out. A decision that is kept follows from the vote, so all ranks keep one or none."""
        against = self.problem or unsupported_tree(tree_cache)
        return against is None and self.settings.policy != STOCK

    def _known(
        self, batch: RunningBatch, query_lens: np.ndarray, against: str | None
    ) -> Decision | None:
        """Decide without a look at the tree, where that can be."""
        against = self.problem or unsupported_tree(batch.tree_cache) or against
        chooses = self._predictor is not None and self.settings.policy != PREFIX
        if against is None and chooses and query_lens.mean() >= self._planner.tile_queries:
            against = "full_tiles"  # each request fills tiles alone; planning them takes longest
        if against is None and self.settings.policy != STOCK:
            return None
        return decide(self._facts(against))

    def _facts(self, against: str | None = None) -> BatchFacts:
        return BatchFacts(
            policy=self.settings.policy,
            model=against,
            least_saving_us=self._least_saving_us,
        )
