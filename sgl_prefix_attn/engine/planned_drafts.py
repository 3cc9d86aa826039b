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

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.engine.asked_tokens import committed
from sgl_prefix_attn.engine.build import Execution
from sgl_prefix_attn.engine.graph_variants import GraphVariants
from sgl_prefix_attn.engine.lane import Lane, Stock
from sgl_prefix_attn.engine.model_facts import least_saving_us
from sgl_prefix_attn.engine.ranks import agreement
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.records import STOCK, Decision
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
        execution: Execution,
        settings: Settings,
        counters: StepCounters,
    ):
        self._stock = stock
        self._runner = runner
        self.counters = counters
        self.variants = GraphVariants(
            settings.max_variant_bs,
            raise_failures=sglang_config.parallel().tp_size > 1,
            steps="draft",
        )
        self._steps = StepPreparer(
            settings,
            execution.planner,
            StepCounters(),  # the metrics of decode steps are the target model's
            predictor=execution.predictor,
            graph_problem=self.variants.problem,
            padded_size=self.variants.padded_size,
            agree=agreement(),
            kind="draft steps",
            least_saving_us=least_saving_us(runner, passes=len(stock.attn_backends)),
        )
        self.lane = Lane(runner, execution, counters, "a draft step", self._only_stock)
        self._slots: Any = None  # of the tokens that the round drafts
        self.attn_backends = [DraftStep(self, i, x) for i, x in enumerate(stock.attn_backends)]

    def __getattr__(self, name: str):
        return getattr(self._stock, name)

    # --- what the hooks call ---------------------------------------------------------------------

    def observe(self, forward_batch, schedule_batch) -> None:
        """Decide and plan the round that SGLang is about to run (after ForwardBatch.init_new)."""
        self.lane.reset()
        if not forward_batch.forward_mode.is_decode():
            return
        pool = self._runner.req_to_token_pool
        if self._steps.problem is None and schedule_batch.req_to_token_pool is not pool:
            self._only_stock("draft_cache")  # the tree does not know its slots
        if self._steps.problem is not None:
            self.counters.draft(Decision(STOCK, self._steps.problem))
            return
        if (decision := self._steps.pass_over()) is not None:
            self.counters.draft(decision)
            return
        step = self.lane.observe(lambda: self._prepare(forward_batch, schedule_batch))
        if step is not None:
            self.counters.draft(step.decision)

    def _prepare(self, forward_batch, schedule_batch) -> Step:
        reqs, tree = schedule_batch.reqs, schedule_batch.tree_cache
        lens, is_exact = committed(forward_batch, reqs)
        seq_lens = lens + 1  # with the first step's token
        self._steps.lengths_jumped(seq_lens)
        table = self._runner.req_to_token_pool.req_to_token
        return self._steps.prepare(RunningBatch(reqs, tree, seq_lens, table, is_exact))

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether the host must know the lengths of the next round: it makes the plan, if one is
        likely to run, and some stock backends need them."""
        return self._steps.needs_lengths or getattr(self._stock, "needs_cpu_seq_lens", True)

    @property
    def needs_eager_step(self) -> bool:
        """Whether the observed round must not replay a graph."""
        return self.lane.needs_eager_step

    def can_capture(self, forward_mode) -> bool:
        """Whether graphs of such steps get two variants."""
        return forward_mode.is_decode() and self._steps.problem is None

    @property
    def graph_is_prefix(self) -> bool:
        """Whether the graph of this round or capture holds prefix kernels."""
        return self.variants.capturing or self.lane.is_prefix

    # --- SGLang's contract of a draft backend ----------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.variants.reset()
        self._stock.init_cuda_graph_state(max_bs, max_num_tokens)
        self.lane.init_graphs(max_bs)

    def init_forward_metadata(self, forward_batch) -> None:
        """Begin a round without a graph."""
        self.lane.take()
        self._begin(forward_batch)
        stock = self.stock_of(0)._replace(init_forward_metadata=self._stock.init_forward_metadata)
        self.lane.begin(forward_batch, stock)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Prepare the capture or replay of a graph.

        A stock graph keeps pointers into what the stock backend makes here for its capture, once a
        size: the capture of the prefix graph must not come there.
        """
        self.lane.take()
        if in_capture:
            self.lane.capture(with_plan=self.variants.capturing)
        if self.lane.active is not None:
            self.lane.load(forward_batch)
        else:
            self._stock.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        self._begin(forward_batch)
        if self.lane.active is None:
            self._stock.init_forward_metadata_in_graph(forward_batch)

    def stock_of(self, i_step: int) -> Stock:
        """Return SGLang's own attention from a step of the round on that runs now."""

        def prepare(forward_batch) -> None:
            start = copy.copy(forward_batch)
            start.positions, start.out_cache_loc = forward_batch.positions - i_step, self._slots
            self._stock.init_forward_metadata(start)

        return Stock(prepare, self._stock.attn_backends[i_step].forward)

    # --- internals -------------------------------------------------------------------------------

    def _begin(self, forward_batch) -> None:
        self._slots = forward_batch.out_cache_loc
        for step in self.attn_backends:
            step.begin()

    def _only_stock(self, reason: str) -> None:
        logger.warning("--attention-backend prefix: draft steps run stock attention (%s)", reason)
        self._steps.only_stock(reason)


class DraftStep:
    """Attention of one step of a round; what is not here is its stock backend's.

    Step i attends to the committed KV of a request, L tokens, and to the i + 1 tokens that the
    round has drafted so far, its own included: what SGLang's draft backends read from req_to_token.
    SGLang leaves the batch's seq_lens at L for all of the round.
    """

    def __init__(self, drafts: PlannedDrafts, i_step: int, stock):
        self._stock = stock
        self._drafts, self._i_step = drafts, i_step
        self._appended = False  # its tokens to the plan

    def __getattr__(self, name: str):
        return getattr(self._stock, name)

    def begin(self) -> None:
        """A round begins, in a graph or without."""
        self._appended = False

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Attend in one layer: q [B, Hq * D], k and v [B, Hkv, D]; returns [B, Hq * D]."""
        drafts = self._drafts
        return drafts.lane.forward(
            q, k, v, layer, forward_batch, save_kv_cache, drafts.stock_of(self._i_step),
            first=lambda: self._append(forward_batch), **kwargs,
        )  # fmt: skip

    def _append(self, forward_batch) -> None:
        """Let the plan grow by the step's tokens before its first layer. Those of the first step
        are in the plan."""
        if not self._appended:
            seq_lens = forward_batch.seq_lens + (self._i_step + 1)
            # A step's slots are a column of the round's, [B, S].
            self._drafts.lane.executor.append(seq_lens, forward_batch.out_cache_loc)
            self._appended = True
