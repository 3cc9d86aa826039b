"""Extend and verify batches over a plan of their own, where they reach the backend.

Driven as the backend is: observe() on the host, begin() or begin_graph() before the forward pass,
forward() in every layer. A plan serves one batch. SGLang runs the attention of extend batches
eagerly, with prefill CUDA graphs around it or without; where such a graph holds attention itself,
they are stock. Verification has decode graphs of two variants (graph_variants.py).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sgl_prefix_attn.engine import model_facts, sglang_config
from sgl_prefix_attn.engine.asked_tokens import asked
from sgl_prefix_attn.engine.build import Execution, padding_plan
from sgl_prefix_attn.engine.cross_check import check_layer
from sgl_prefix_attn.engine.planned_layer import (
    attend,
    must_raise,
    option_of,
    padded_output,
    write_kv,
)
from sgl_prefix_attn.engine.ranks import agreement
from sgl_prefix_attn.execute.backends.choice import row_tile_backend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.predict.prefill_time import PrefillTime
from sgl_prefix_attn.records import PREFIX, Decision, HeadConfig
from sgl_prefix_attn.settings import BACKEND_NAME, Settings
from sgl_prefix_attn.step.extend import ExtendPreparer
from sgl_prefix_attn.step.preparer import Step

logger = logging.getLogger(__name__)

# New tokens of a batch that the workspace is made for: larger ones are chunks of long prompts,
# which fill tiles by themselves.
_MOST_QUERIES = 1 << 14


@dataclass(frozen=True)
class PlannedKinds:
    """Which batches of several tokens a request reach the backend and may run plans: prompts, and
    drafts that a target model verifies."""

    prefill: bool
    verify: bool

    @classmethod
    def of(cls, server_args, settings: Settings) -> "PlannedKinds":
        """Verification is planned where SGLang does it with the decode backend, or where prefill
        is."""
        prefill_name, decode_name = sglang_config.attention_backends(server_args)
        options = sglang_config.options(server_args)
        prefill = prefill_name == BACKEND_NAME and settings.prefill
        mode, speculates = options.speculative_attention_mode, options.speculative_algorithm
        by_decode = mode == "decode" and speculates is not None
        return cls(prefill, decode_name == BACKEND_NAME and (prefill or by_decode))

    @property
    def any(self) -> bool:
        return self.prefill or self.verify

    def __str__(self) -> str:
        return " and ".join(name for name, planned in vars(self).items() if planned)


def build_extends(
    runner,
    heads: HeadConfig,
    settings: Settings,
    counters: StepCounters,
    stock_of: Callable[[Any], AttentionBackend],
    decode: Execution,
) -> "Extends | None":
    """Build what runs extend and verify batches beside `decode`; None where all of them are stock:
    by the settings, with other backends, or without row tiles."""
    kinds = PlannedKinds.of(runner.server_args, settings)
    if not kinds.any:
        return None
    device = torch.device(runner.device)
    backend: Any  # of row tiles
    rates = None
    if isinstance(decode.planner, RowTilePlanner):
        backend, rates = decode.executor.backend, decode.planner.rates  # the same on all ranks
    elif device.type == "cpu":
        backend = row_tile_backend(device, heads, runner.dtype)
    else:
        logger.info(
            "--attention-backend prefix: %s batches run stock attention (no row tiles)", kinds
        )
        return None
    capacity = backend.server_capacity(_MOST_QUERIES, runner.max_total_num_tokens, 0)
    planner = RowTilePlanner(
        heads,
        num_sms=backend.num_sms,
        rates=rates,
        capacity=capacity,
    )
    planner.warm_up()
    executor = PlanExecutor(backend, capacity)
    preparer = ExtendPreparer(
        settings,
        planner,
        capacity.check,
        counters,
        predictor=None if device.type == "cpu" else PrefillTime(heads),
        problem=model_facts.unsupported_extend(runner),
        least_saving_us=model_facts.least_saving_us(runner),
        agree=agreement(),
    )
    logger.info("--attention-backend prefix: row tiles serve %s batches of shared prefixes", kinds)
    why_not = model_facts.no_draft_steps(runner.server_args)
    if why_not is not None:
        logger.info("--attention-backend prefix: the draft model runs stock kernels (%s)", why_not)
    return Extends(runner, kinds, stock_of, preparer, planner, executor, counters)


class Extends:
    """Observed extend batches, one at a time, and the attention of those that run a plan.

    stock_of  the stock backend of a ForwardBatch
    """

    def __init__(
        self,
        runner,
        kinds: PlannedKinds,
        stock_of: Callable[[Any], AttentionBackend],
        preparer: ExtendPreparer,
        planner: RowTilePlanner,
        executor: PlanExecutor,
        counters: StepCounters,
    ):
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._kv_pool = runner.token_to_kv_pool
        self._stock_of = stock_of
        self._preparer = preparer
        self._executor = executor
        self._counters = counters
        self.observed: Step | None = None  # prefix steps alone
        self._active: Step | None = None
        self._capture = Step(Decision(PREFIX, "capture"), padding_plan(planner))
        self._num_queries = 0  # of the observed or active batch
        self._verifies = False  # it is one of a target model that verifies
        self._prefill_graph: str | None = None
        self._kinds = kinds
        self.can_verify = kinds.verify

    @property
    def is_active(self) -> bool:
        """Whether the batch that runs now runs a plan."""
        return self._active is not None

    @property
    def needs_lengths(self) -> bool:
        """Whether the next batch that verifies is likely to run a plan, which takes exact lengths:
        the last one did, or was to."""
        return self._preparer.needs_lengths

    @property
    def graph_is_prefix(self) -> bool:
        """Whether the decode graph of this batch or capture verifies over a plan."""
        return self._verifies and (self.observed or self._active) is not None

    def observe(self, forward_batch, schedule_batch, graph_problem: str | None) -> None:
        """Decide and plan the batch that SGLang is about to run, if it extends or verifies.

        graph_problem  why a decode graph of its size has no prefix variant, or None
        """
        self.observed = self._active = None
        self._verifies = forward_batch.forward_mode.is_target_verify()
        if not (self._kinds.verify if self._verifies else self._kinds.prefill):
            return
        if self._verifies and self._preparer.pass_over() is not None:
            return
        try:
            batch_asks = asked(forward_batch, schedule_batch.reqs)
        except Exception as error:
            self._preparer.unreadable(error, self._verifies)
            return
        if batch_asks is None:
            return
        against = batch_asks.against or (graph_problem if self._verifies else self._prefill_graph)
        batch = RunningBatch(
            schedule_batch.reqs,
            schedule_batch.tree_cache,
            batch_asks.seq_lens,
            self._req_to_token,
            batch_asks.is_exact,
        )
        step = self._preparer.prepare(batch, batch_asks.query_lens, against, self._verifies)
        if step.is_prefix:
            self.observed, self._num_queries = step, int(batch_asks.query_lens.sum())

    def begin(self, forward_batch) -> bool:
        """Load the observed batch's plan; whether the batch does without stock metadata."""
        self._active, self.observed = self.observed, None
        if self._active is None:
            return False
        try:
            self._load(forward_batch)
        except Exception as error:
            self._fail(error, forward_batch)
            return True
        return not self._active.cross_check

    def begin_graph(self, forward_batch, in_capture: bool, capturing: bool) -> bool:
        """Prepare the capture or replay of a graph; whether it verifies over a plan.

        capturing  the prefix variant is being captured
        """
        if not forward_batch.forward_mode.is_target_verify():
            if self.observed is not None:
                self._prefill_graph = "prefill_graph"
            self.observed = self._active = None
            return False
        self._active, self.observed = self.observed, None
        if in_capture:
            self._verifies, self._num_queries = True, 0
            self._active = self._capture if capturing else None
        if self._active is None:
            return False
        self._load(forward_batch)
        return True

    def only_stock(self, reason: str) -> None:
        """Let no batch from now on run a plan."""
        self._preparer.only_stock(reason)
        self.can_verify = False

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache, **kwargs):
        """Attend in one layer: q [Q, Hq * D], k and v [Q, Hkv, D]; returns [Q, Hq * D]."""
        if option := option_of(kwargs):
            self._leave(f"layer_option:{option}", forward_batch)
            return self._stock_of(forward_batch).forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
        write_kv(self._kv_pool, k, v, layer, forward_batch, save_kv_cache)
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = padded_output(rows, self._num_queries)
        try:
            attend(self._executor, self._kv_pool, rows, layer, forward_batch.seq_lens, out)
        except Exception as error:
            self._fail(error, forward_batch)
            return self._over_written_kv(q, k, v, layer, forward_batch)
        out = out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
        if self._active is not None and self._active.cross_check:
            expected = self._over_written_kv(q, k, v, layer, forward_batch)
            check_layer(layer.layer_id, out, expected, self._counters)
        return out

    def _load(self, forward_batch) -> None:
        plan: Any = self._active and self._active.new_plan
        self._executor.load(plan, self._req_to_token, forward_batch.req_pool_indices)

    def _fail(self, error: Exception, forward_batch) -> None:
        """Go on with stock attention after kernels that failed; raises the error where that cannot
        be."""
        if must_raise(error, capturing=self._active is self._capture):
            raise error
        kind = "a verify" if self._verifies else "an extend"
        logger.error("prefix kernels failed in %s batch: %s", kind, error, exc_info=error)
        self._leave("kernel_error", forward_batch)

    def _leave(self, reason: str, forward_batch) -> None:
        """Run stock from here on, in the middle of a batch."""
        logger.warning(
            "--attention-backend prefix: extend and verify batches run stock attention (%s)", reason
        )
        self.only_stock(reason)
        if self._active is not self._capture:
            # In a capture the stock graph of the same size has just left its metadata in place.
            self._stock_of(forward_batch).init_forward_metadata(forward_batch)
        self._active = None

    def _over_written_kv(self, q, k, v, layer, forward_batch):
        """Stock attention of a layer whose k and v are in the pool already."""
        stock = self._stock_of(forward_batch)
        return stock.forward_extend(q, k, v, layer, forward_batch, save_kv_cache=False)
