"""`--attention-backend prefix`: SGLang's attention backend over the plan and its executor.

Stock steps and batches go to composed backends of SGLang's own; prefix decode steps run the plan,
prefix batches that extend or verify one of their own (extends.py). SGLang's three-method contract:

    hook after ForwardBatch.init_new   observe                          decide and plan, on the host
    before the graph (or eager)        init_forward_metadata_out_graph  upload a new plan
    in the graph (or eager)            init_forward_metadata_in_graph   append this step's slots
    every layer                        forward_decode                   write KV, run the plan

A decode graph exists in two variants, stock and prefix (graph_variants.py); the step's decision
chooses. Batch state lives here and never on the ForwardBatch: graph replay passes a copy of it.
"""

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sgl_prefix_attn.engine import model_facts, sglang_config
from sgl_prefix_attn.engine.build import build, padding_plan
from sgl_prefix_attn.engine.counters_of import counters_of
from sgl_prefix_attn.engine.cross_check import check_layer
from sgl_prefix_attn.engine.extends import Extends, PlannedKinds, build_extends
from sgl_prefix_attn.engine.graph_variants import GraphVariants
from sgl_prefix_attn.engine.planned_layer import (
    attend,
    must_raise,
    option_of,
    padded_output,
    write_kv,
)
from sgl_prefix_attn.engine.ranks import agreement
from sgl_prefix_attn.engine.runner_backend import find_backend
from sgl_prefix_attn.execute.backends.choice import why_no_backend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.records import Decision
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step import policy
from sgl_prefix_attn.step.preparer import Step, StepPreparer

logger = logging.getLogger(__name__)

# What FlashInfer declares of itself beside SGLang's three methods, for the steps that it runs here.
STOCK_FACTS = ("extend_dummy_seqs_capped_by_req_pool", "kv_index_translator", "max_context_len")
_UNOBSERVED = Step(Decision(policy.STOCK, "no_batch"))
_CAPTURE = Decision(policy.PREFIX, "capture")


def create_stock(runner) -> AttentionBackend:
    """SGLang's own backend that this plugin composes: FlashInfer on a GPU, torch on a CPU."""
    return ATTENTION_BACKENDS["torch_native" if runner.device == "cpu" else "flashinfer"](runner)


def create_stock_extend(runner) -> AttentionBackend:
    """SGLang's own backend on a Hopper GPU, FlashAttention 3: it extends and verifies faster."""
    return ATTENTION_BACKENDS["fa3"](runner)


class PrefixAttnBackend(AttentionBackend):
    """Decode attention that reads every shared KV prefix once."""

    _executor: PlanExecutor  # where any step of the model can run prefix kernels

    def __init__(self, runner, settings: Settings):
        super().__init__()
        self.stock = create_stock(runner)
        for name in STOCK_FACTS:
            if hasattr(self.stock, name):  # not in every release
                setattr(self, name, getattr(self.stock, name))
        counters = counters_of(runner)
        # SGLang reads the pools through the active backend.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._runner = runner
        self._model_problem = model_facts.unsupported_model(runner)
        planner, predictor = None, None
        self._padding: Any = None  # the step that captures run, where there is one
        self._extends: Extends | None = None
        self._stock_extend = self._stock_verify = self.stock
        # A target model that verifies never decodes, but its other batches may run plans.
        speculates = model_facts.speculative(runner.server_args)
        if self._model_problem in (None, speculates):
            self._heads = model_facts.head_config(runner)
            problem = why_no_backend(torch.device(runner.device), self._heads, runner.dtype)
            self._model_problem = problem or self._model_problem
        kinds = PlannedKinds.of(runner.server_args, settings)
        if self._model_problem is None or (self._model_problem == speculates and kinds.any):
            built = build(runner, self._heads, settings)
            self._extends = build_extends(
                runner, self._heads, settings, counters, self._stock_of, built
            )
            chains = kinds.verify and model_facts.verifies_chains(runner.server_args)
            if self._extends is not None and runner.device != "cpu" and (kinds.prefill or chains):
                extending = create_stock_extend(runner)
                if kinds.prefill:
                    self._stock_extend = extending
                if chains:
                    self._stock_verify = extending
        if self._model_problem is None:
            planner, predictor = built.planner, built.predictor
            self._executor = built.executor
            self._padding = Step(_CAPTURE, padding_plan(built.planner))
        elif self._extends is not None:
            logger.info(
                "--attention-backend prefix: decode steps run stock attention (%s)",
                self._model_problem,
            )
        else:
            logger.warning(
                "--attention-backend prefix: every step runs stock attention (%s)",
                self._model_problem,
            )
        self.variants = GraphVariants(
            0 if settings.policy == policy.STOCK else settings.max_variant_bs,
            raise_failures=sglang_config.parallel().tp_size > 1,
        )
        self._steps = StepPreparer(
            settings,
            planner,
            lambda plan: self._executor.capacity.check(plan),
            counters,
            predictor=predictor,
            graph_problem=self.variants.problem,
            padded_size=self.variants.padded_size,
            model_problem=self._model_problem,
            agree=agreement(),
        )
        self._observed: Step | None = None
        self._active: Step = _UNOBSERVED

    # --- what the hooks call ---------------------------------------------------------------------

    def observe(self, forward_batch, schedule_batch) -> None:
        """Decide and plan the step that SGLang is about to run (after ForwardBatch.init_new)."""
        self._observed, self._active = None, _UNOBSERVED
        if self._extends is not None:
            self._extends.observe(
                forward_batch, schedule_batch, self.variants.problem(len(schedule_batch.reqs))
            )
        if not forward_batch.forward_mode.is_decode() or forward_batch.seq_lens_cpu is None:
            self._steps.interrupt()
            return
        try:
            self._observed = self._steps.prepare(
                RunningBatch(
                    schedule_batch.reqs,
                    schedule_batch.tree_cache,
                    forward_batch.seq_lens_cpu.numpy(),
                    self.req_to_token_pool.req_to_token,
                )
            )
        except Exception:
            if sglang_config.parallel().tp_size > 1:
                raise  # the other ranks would wait for this one's word
            logger.exception("a decode step could not be prepared")
            self._only_stock("internal_error")

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether the host must know the lengths of the next batch of drafts that is verified here:
        it makes the plan, if one is likely to run, and some stock backends need them."""
        plans = self._extends is not None and self._extends.needs_lengths
        return plans or self._stock_verify.needs_cpu_seq_lens

    @property
    def verify_mask(self):
        """The mask that SGLang fills while it builds drafts, where the stock backend has one: of
        chains, none that anybody reads."""
        return self._stock_verify.verify_mask

    @property
    def counters(self) -> StepCounters:
        """What this backend's decode steps did."""
        return self._steps.counters

    @property
    def needs_eager_step(self) -> bool:
        """Whether the observed step must not replay a graph."""
        observed = self._observed or (self._extends and self._extends.observed)
        return bool(observed and observed.cross_check)

    @property
    def can_run_prefix(self) -> bool:
        """Whether any decode step of this model can run prefix kernels."""
        return self._model_problem is None

    def can_capture(self, forward_mode) -> bool:
        """Whether graphs of decode steps, or of a target model's verification, get two variants."""
        if forward_mode.is_target_verify():
            return self._extends is not None and self._extends.can_verify
        return forward_mode.is_decode() and self.can_run_prefix

    @property
    def graph_is_prefix(self) -> bool:
        """Whether the graph of this step or capture holds prefix kernels.

        SGLang asks before out_graph, about the observed step, and after it, about the active one.
        """
        verifies = self._extends is not None and self._extends.graph_is_prefix
        return verifies or (self._observed or self._active).is_prefix

    # --- SGLang's metadata contract --------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._find_wrapper()
        self.variants.reset()
        for stock in self._graph_stocks():
            stock.init_cuda_graph_state(max_bs, max_num_tokens)
        if self._padding is not None:
            # Nothing writes padding rows: they must hold finite numbers, because a model may take
            # statistics over all rows (dynamic activation scales, expert routing).
            heads = self._heads
            shape = (max_bs, heads.num_qo_heads, heads.head_dim)
            self._graph_out = torch.zeros(
                shape, dtype=self._runner.dtype, device=self._runner.device
            )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.stock.get_cuda_graph_seq_len_fill_value()

    def on_after_cuda_graph_warmup(self) -> None:
        for stock in self._graph_stocks():
            stock.on_after_cuda_graph_warmup()

    def init_forward_metadata(self, forward_batch) -> None:
        """Eager entry point."""
        self._find_wrapper()
        step = self._take_step(forward_batch.forward_mode)
        if self._extends is not None and self._extends.begin(forward_batch):
            return
        if not step.is_prefix or step.cross_check:
            self._stock_of(forward_batch).init_forward_metadata(forward_batch)
        if step.is_prefix:
            try:
                self._load(step, forward_batch)
                self._append(forward_batch)
            except Exception as error:
                self._survive(error, forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Prepare the capture or replay of a graph.

        A stock graph keeps pointers into what the stock backend makes here for its capture, once a
        size: the capture of the prefix graph must not come this way.
        """
        self._take_step(forward_batch.forward_mode)
        if self._extends is not None and self._extends.begin_graph(
            forward_batch, in_capture, self.variants.capturing
        ):
            return
        if in_capture:
            self._steps.lifetime.invalidate("capture")
            self._active = self._padding if self.variants.capturing else _UNOBSERVED
        if self._active.is_prefix:
            self._load(self._active, forward_batch)
        else:
            self._stock_of(forward_batch).init_forward_metadata_out_graph(
                forward_batch, in_capture=in_capture
            )

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        if self._extends is not None and self._extends.is_active:
            return  # its plan does not grow
        if self._active.is_prefix:
            self._append(forward_batch)
        else:
            self._stock_of(forward_batch).init_forward_metadata_in_graph(forward_batch)

    # --- attention -------------------------------------------------------------------------------

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if self._extends is not None and self._extends.is_active:
            return self._extends.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._stock_of(forward_batch).forward_extend(
            q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
        )

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Attend in one layer: q [B, Hq * D], k and v [B, Hkv, D]; returns [B, Hq * D]."""
        option = option_of(kwargs)
        if option and self._active.is_prefix:
            self._leave_prefix(f"layer_option:{option}", forward_batch)
        if not self._active.is_prefix:
            return self.stock.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
        write_kv(self.token_to_kv_pool, k, v, layer, forward_batch, save_kv_cache)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        # One output for all layers of a graph: a layer's is consumed before the next writes it.
        if self._active is self._padding:
            out = self._graph_out[: len(q)]
        else:
            out = padded_output(q, self._executor.batch_size)
        try:
            attend(self._executor, self.token_to_kv_pool, q, layer, forward_batch.seq_lens, out)
        except Exception as error:
            self._survive(error, forward_batch)
            return self._stock_over_written_kv(q, k, v, layer, forward_batch)
        out = out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
        if self._active.cross_check:
            expected = self._stock_over_written_kv(q, k, v, layer, forward_batch)
            check_layer(layer.layer_id, out, expected, self.counters)
        return out

    # --- internals -------------------------------------------------------------------------------

    def _stock_of(self, forward_batch) -> AttentionBackend:
        """The stock backend of such a batch."""
        mode = forward_batch.forward_mode
        if mode.is_extend_without_speculative():
            return self._stock_extend
        return self._stock_verify if mode.is_target_verify() else self.stock

    def _graph_stocks(self) -> set[AttentionBackend]:
        """The stock backends that decode graphs are captured with."""
        return {self.stock, self._stock_verify}

    def _take_step(self, forward_mode) -> Step:
        """Make the observed step the active one; each is used once."""
        step = self._observed if forward_mode.is_decode() else None
        self._observed = None
        self._active = step or _UNOBSERVED
        return self._active

    def _load(self, step: Step, forward_batch) -> None:
        if step.new_plan is not None:
            table = self.req_to_token_pool.req_to_token
            self._executor.load(step.new_plan, table, forward_batch.req_pool_indices)

    def _append(self, forward_batch) -> None:
        self._executor.append(forward_batch.seq_lens, forward_batch.out_cache_loc)

    def _survive(self, error: Exception, forward_batch) -> None:
        """Run stock from here on, after kernels that failed to compile or launch in an eager step;
        raises the error where that cannot be."""
        if must_raise(error, capturing=self._active is self._padding):
            raise error
        logger.error("prefix kernels failed: %s", error, exc_info=error)
        self._leave_prefix("kernel_error", forward_batch)

    def _leave_prefix(self, reason: str, forward_batch) -> None:
        """Run stock from here on, in the middle of a prefix step."""
        self._only_stock(reason)
        if self._active is not self._padding:
            # In a capture the stock graph of the same size has just left its metadata in place.
            self.stock.init_forward_metadata(forward_batch)
        self._active = _UNOBSERVED

    def _find_wrapper(self) -> None:
        """Run stock alone behind a wrapper that hides us: no batch ever reaches us there."""
        if self._model_problem is None and find_backend(self._runner) is not self:
            self._only_stock("wrapped_backend")

    def _only_stock(self, reason: str) -> None:
        logger.warning("--attention-backend prefix: all steps run stock attention (%s)", reason)
        self._model_problem = reason
        self._steps.only_stock(reason)
        if self._extends is not None:
            self._extends.only_stock(reason)

    def _stock_over_written_kv(self, q, k, v, layer, forward_batch):
        """Stock attention of a layer whose k and v are in the pool already; q [B, Hq, D]."""
        flat = q.reshape(len(q), -1)
        return self.stock.forward_decode(flat, k, v, layer, forward_batch, save_kv_cache=False)
