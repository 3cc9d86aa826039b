"""The decode steps of a draft model over a plan: one plan a round, which grows by a token a step.

A round of speculative decoding that drafts chains of S tokens runs the draft model S - 1 times over
one new token of each request. SGLang has a backend of such a round with a child for each step:

    hook after ForwardBatch.init_new   observe                          decide and plan, on the host
    before the graph (or eager)        init_forward_metadata_out_graph  upload the plan
    in the graph (or eager)            init_forward_metadata_in_graph   the round begins
    every layer of step i              attn_backends[i].forward         write KV, run the plan

No plan outlives its round: what it drafts may be rejected. The GPU waits for the host between
rounds, so after one that stock kernels run the next ones are not even looked at.
"""

import copy
import logging
from typing import Any

import torch

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.engine.asked_tokens import committed
from sgl_prefix_attn.engine.build import Execution, padding_plan
from sgl_prefix_attn.engine.draft_step import DraftStep
from sgl_prefix_attn.engine.graph_variants import GraphVariants
from sgl_prefix_attn.engine.model_facts import least_saving_us
from sgl_prefix_attn.engine.planned_layer import must_raise, padded_output
from sgl_prefix_attn.engine.ranks import agreement
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.records import PREFIX, Decision, HeadConfig
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.preparer import Step, StepPreparer

logger = logging.getLogger(__name__)


class PlannedDrafts:
    """SGLang's backend of draft steps with plans beside it; what is not here is SGLang's.

    runner    the draft model's ModelRunner
    stock     SGLang's own backend of a round's steps
    counters  count rounds, and layers that differ from stock attention
    """

    def __init__(
        self,
        runner,
        stock,
        heads: HeadConfig,
        execution: Execution,
        settings: Settings,
        counters: StepCounters,
    ):
        self._stock = stock
        self._runner, self._heads = runner, heads
        self.executor = execution.executor
        self.counters = counters
        self.variants = GraphVariants(
            settings.max_variant_bs,
            raise_failures=sglang_config.parallel().tp_size > 1,
            steps="draft",
        )
        self._steps = StepPreparer(
            settings,
            execution.planner,
            execution.executor.capacity.check,
            StepCounters(),  # the metrics of decode steps are the target model's
            predictor=execution.predictor,
            graph_problem=self.variants.problem,
            padded_size=self.variants.padded_size,
            agree=agreement(),
            kind="draft",
            least_saving_us=least_saving_us(runner, passes=len(stock.attn_backends)),
        )
        self.can_run_prefix = True
        self._capture = Step(Decision(PREFIX, "capture"), padding_plan(execution.planner))
        self._observed: Step | None = None  # prefix rounds alone
        self._active: Step | None = None
        self._slots: Any = None  # of the tokens that the round drafts
        self.attn_backends = [DraftStep(self, i, x) for i, x in enumerate(stock.attn_backends)]

    def __getattr__(self, name: str):
        return getattr(self._stock, name)

    # --- what the hooks call ---------------------------------------------------------------------

    def observe(self, forward_batch, schedule_batch) -> None:
        """Decide and plan the round that SGLang is about to run (after ForwardBatch.init_new)."""
        self._observed = self._active = None
        if not forward_batch.forward_mode.is_decode():
            return
        pool = self._runner.req_to_token_pool
        if self.can_run_prefix and schedule_batch.req_to_token_pool is not pool:
            self._only_stock("draft_cache")  # the tree does not know its slots
        if (decision := self._steps.pass_over()) is not None:
            self.counters.draft(decision)
            return
        reqs = schedule_batch.reqs
        lens, is_exact = committed(forward_batch, reqs)
        seq_lens = lens + 1  # with the first step's token
        self._steps.lengths_jumped(seq_lens)
        batch = RunningBatch(reqs, schedule_batch.tree_cache, seq_lens, pool.req_to_token, is_exact)
        try:
            step = self._steps.prepare(batch)
        except Exception:
            if sglang_config.parallel().tp_size > 1:
                raise  # the other ranks would wait for this one's word
            logger.exception("a round of draft steps could not be prepared")
            self._only_stock("internal_error")
            return
        self.counters.draft(step.decision)
        if step.is_prefix:
            self._observed = step

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether the host must know the lengths of the next round: it makes the plan, if one is
        likely to run, and some stock backends need them."""
        return self._steps.needs_lengths or getattr(self._stock, "needs_cpu_seq_lens", True)

    @property
    def needs_eager_step(self) -> bool:
        """Whether the observed round must not replay a graph."""
        return self._observed is not None and self._observed.cross_check

    def can_capture(self, forward_mode) -> bool:
        """Whether graphs of such steps get two variants."""
        return forward_mode.is_decode() and self.can_run_prefix

    @property
    def graph_is_prefix(self) -> bool:
        """Whether the graph of this round or capture holds prefix kernels."""
        return self.variants.capturing or (self._observed or self._active) is not None

    # --- SGLang's contract of a draft backend ----------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.variants.reset()
        self._stock.init_cuda_graph_state(max_bs, max_num_tokens)
        # Nothing writes padding rows, as in PrefixAttnBackend.init_cuda_graph_state.
        self._graph_out = torch.zeros(
            (max_bs, self._heads.num_qo_heads, self._heads.head_dim),
            dtype=self._runner.dtype,
            device=self._runner.device,
        )

    def init_forward_metadata(self, forward_batch) -> None:
        """Begin a round without a graph."""
        self._active, self._observed = self._observed, None
        if self._active is None or self._active.cross_check:
            self._stock.init_forward_metadata(forward_batch)
        self._begin(forward_batch)
        if self._active is not None:
            try:
                self._load(forward_batch)
            except Exception as error:
                self.fail(error, 0, forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Prepare the capture or replay of a graph.

        A stock graph keeps pointers into what the stock backend makes here for its capture, once a
        size: the capture of the prefix graph must not come there.
        """
        self._active, self._observed = self._observed, None
        if in_capture:
            self._active = self._capture if self.variants.capturing else None
        if self._active is not None:
            self._load(forward_batch)
        else:
            self._stock.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        self._begin(forward_batch)
        if self._active is None:
            self._stock.init_forward_metadata_in_graph(forward_batch)

    # --- what the steps call ---------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether the round that runs now runs a plan."""
        return self._active is not None

    @property
    def cross_checks(self) -> bool:
        """Whether its layers are compared with stock attention."""
        return self._active is not None and self._active.cross_check

    @property
    def token_to_kv_pool(self):
        return self._runner.token_to_kv_pool

    def output(self, q: torch.Tensor) -> torch.Tensor:
        """Return a layer's output, like q [>= B, Hq, D], whose padding rows are zero."""
        if self._active is self._capture:
            return self._graph_out[: len(q)]  # a layer's is consumed before the next writes it
        return padded_output(q, self.executor.batch_size)

    def fail(self, error: Exception, i_step: int, forward_batch) -> None:
        """Go on with stock attention after kernels that failed; raises the error where that cannot
        be."""
        if must_raise(error, capturing=self._active is self._capture):
            raise error
        logger.error("prefix kernels failed in a draft step: %s", error, exc_info=error)
        self.leave("kernel_error", i_step, forward_batch)

    def leave(self, reason: str, i_step: int, forward_batch) -> None:
        """Run stock from here on, in the middle of a round."""
        self._only_stock(reason)
        if self._active is not self._capture:
            # In a capture the stock graph of the same size has just left its metadata in place.
            start = copy.copy(forward_batch)
            start.positions, start.out_cache_loc = forward_batch.positions - i_step, self._slots
            self._stock.init_forward_metadata(start)
        self._active = None

    # --- internals -------------------------------------------------------------------------------

    def _begin(self, forward_batch) -> None:
        self._slots = forward_batch.out_cache_loc
        for step in self.attn_backends:
            step.begin()

    def _load(self, forward_batch) -> None:
        plan: Any = self._active and self._active.new_plan
        table = self._runner.req_to_token_pool.req_to_token
        self.executor.load(plan, table, forward_batch.req_pool_indices)

    def _only_stock(self, reason: str) -> None:
        logger.warning("--attention-backend prefix: draft steps run stock attention (%s)", reason)
        self._steps.only_stock(reason)
        self.can_run_prefix = False
