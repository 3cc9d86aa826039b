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

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sgl_prefix_attn.engine import (
    determinism,
    fallback,
    layer_groups,
    model_facts,
    sglang_config,
)
from sgl_prefix_attn.engine.asked_tokens import decode_step
from sgl_prefix_attn.engine.build import build
from sgl_prefix_attn.engine.counters_of import counters_of
from sgl_prefix_attn.engine.extends import Extends
from sgl_prefix_attn.engine.fallback import create_stock
from sgl_prefix_attn.engine.graph_variants import GraphVariants
from sgl_prefix_attn.engine.lane import Lane
from sgl_prefix_attn.engine.ranks import agreement
from sgl_prefix_attn.engine.runner_backend import find_backend
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step import policy
from sgl_prefix_attn.step.preparer import StepPreparer

logger = logging.getLogger(__name__)

# What stock backends declare of themselves beside SGLang's three methods, for the steps they run.
STOCK_FACTS = ("extend_dummy_seqs_capped_by_req_pool", "kv_index_translator", "max_context_len")
# What is asked for where prompts of latent attention expand their cached prefix in chunks.
CHUNKS = (
    "init_mha_chunk_metadata",
    "supports_full_cuda_graph_chunked_prefix",
    "prepare_full_cuda_graph_chunked_prefix",
)


class PrefixAttnBackend(AttentionBackend):
    """Decode attention that reads every shared KV prefix once, for a runner of which some batches
    can run plans (stock_alone.why_stock_alone).

    decode   the lane of decode steps, all stock where the target model verifies and never decodes
    extends  of batches with several tokens a request
    """

    def __init__(self, runner, settings: Settings):
        super().__init__()
        settings = determinism.settings_of(runner.server_args, settings)
        self.fallback = fallback.of(runner, settings)
        groups, heads = layer_groups.read(runner), model_facts.head_config(runner)
        # before the others, which take memory
        built = build(runner, heads, settings, self.fallback.name)
        self.stock = create_stock(runner, self.fallback.name)
        for name in STOCK_FACTS:
            if hasattr(self.stock, name):  # not in every release
                setattr(self, name, getattr(self.stock, name))
        # SGLang reads the pools through the active backend.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._runner = runner
        self._dims = heads.head_dim, heads.value_dim
        counters = counters_of(runner, model_facts.planned_layers(runner))
        counters.fallback(*self.fallback)
        self._beside: AttentionBackend | None = None
        self._stock_layers = frozenset(i for group in groups.left for i in group.layer_ids)
        if self._stock_layers:
            # Of the graphs with prefix kernels: their layers outside the plan need metadata that no
            # other capture replaces.
            self._beside = create_stock(runner, self.fallback.name)
            logger.info("--attention-backend prefix: plans serve %s", groups.planned)
        for group in groups.left:
            logger.info(
                "--attention-backend prefix: stock attention serves %s: %s", group, group.reason
            )
        self.extends = Extends(runner, settings, counters, built)
        self._stock_extend = self._stock_verify = self.stock
        self._take_up_stock_extend()
        for name in CHUNKS:
            if hasattr(self._stock_extend, name):
                setattr(self, name, getattr(self._stock_extend, name))
        self.decode = Lane(runner, built, counters, "a decode step", self._only_stock)
        # A target model that verifies never decodes, but its other batches may run plans.
        problem = model_facts.speculative(runner.server_args)
        if problem is not None:
            logger.info(
                "--attention-backend prefix: decode steps run stock attention (%s)", problem
            )
        deterministic = determinism.is_on(runner.server_args)
        self.variants = GraphVariants(
            0 if settings.policy == policy.STOCK else settings.max_variant_bs,
            raise_failures=sglang_config.parallel().tp_size > 1 or deterministic,
        )
        self._steps = StepPreparer(
            settings,
            built.planner,
            counters,
            predictor=built.predictor,
            graph_problem=self.variants.problem,
            padded_size=self.variants.padded_size,
            deterministic=deterministic,
            problem=problem,
            agree=agreement(),
        )

    # --- what the hooks call ---------------------------------------------------------------------

    def observe(self, forward_batch, schedule_batch) -> None:
        """Decide and plan the step that SGLang is about to run (after ForwardBatch.init_new)."""
        problem = self.variants.problem(len(schedule_batch.reqs))
        self.extends.observe(forward_batch, schedule_batch, problem)
        table = self.req_to_token_pool.req_to_token
        self.decode.observe(lambda: decode_step(self._steps, forward_batch, schedule_batch, table))

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether the host must know the lengths of the next batch of drafts that is verified here:
        it makes the plan, if one is likely to run, and some stock backends need them."""
        return self.extends.needs_lengths or self._stock_verify.needs_cpu_seq_lens

    @property
    def verify_mask(self):
        """The mask that SGLang fills while it builds drafts, where the stock backend has one.
        Nobody reads it for chains."""
        return self._stock_verify.verify_mask

    @property
    def counters(self) -> StepCounters:
        """What this backend's decode steps did."""
        return self._steps.counters

    @property
    def needs_eager_step(self) -> bool:
        """Whether the observed step must not replay a graph."""
        return self.decode.needs_eager_step or self.extends.lane.needs_eager_step

    @property
    def can_run_prefix(self) -> bool:
        """Whether any decode step of this model can run prefix kernels."""
        return self._steps.problem is None

    def can_capture(self, forward_mode) -> bool:
        """Whether graphs of decode steps, or of a target model's verification, get two variants."""
        if forward_mode.is_target_verify():
            return self.extends.can_verify
        return forward_mode.is_decode() and self.can_run_prefix

    @property
    def graph_is_prefix(self) -> bool:
        """Whether the graph of this step or capture holds prefix kernels.

        SGLang asks before out_graph, about the observed step, and after it, about the active one.
        """
        return self.extends.graph_is_prefix or self.decode.is_prefix

    # --- SGLang's metadata contract --------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._find_wrapper()
        self.variants.reset()
        for stock in self._graph_stocks() - {self._beside}:
            stock.init_cuda_graph_state(max_bs, max_num_tokens)
        if self._beside is not None and (most := min(max_bs, self.variants.max_bs)):
            # Its tables are as wide as the model's context: no more rows than its graphs have.
            self._beside.init_cuda_graph_state(most, min(max_num_tokens, most))
        if self.can_run_prefix:
            self.decode.init_graphs(max_num_tokens)
        if self.extends.can_verify:
            self.extends.lane.init_graphs(max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.stock.get_cuda_graph_seq_len_fill_value()

    def on_after_cuda_graph_warmup(self) -> None:
        for stock in self._graph_stocks():
            stock.on_after_cuda_graph_warmup()

    def init_forward_metadata(self, forward_batch) -> None:
        """Eager entry point."""
        self._find_wrapper()
        lane, stock = self._take(forward_batch), self._stock_of(forward_batch)
        beside = self._beside is not None
        lane.begin(forward_batch, stock, appends=lane is self.decode, beside=beside)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Prepare the capture or replay of a graph.

        A stock graph keeps pointers into what the stock backend makes here for its capture, once a
        size: the capture of the prefix graph must not come this way.
        """
        if not forward_batch.forward_mode.is_target_verify():
            self.extends.held_by_a_graph()
        lane = self._take(forward_batch)
        if in_capture:
            self._steps.lifetime.invalidate("capture")
            lane.capture(with_plan=self.variants.capturing)
        stock: AttentionBackend | None = self._stock_of(forward_batch)
        if lane.active is not None:
            lane.load(forward_batch)
            stock = self._beside
        if stock is not None:
            stock.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        lane = self._lane_of(forward_batch.forward_mode)
        if lane.active is None:
            self._stock_of(forward_batch).init_forward_metadata_in_graph(forward_batch)
        elif lane is self.decode:
            lane.append(forward_batch)  # plans of several tokens a request do not grow
            if self._beside is not None:
                self._beside.init_forward_metadata_in_graph(forward_batch)

    # --- attention -------------------------------------------------------------------------------

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        """Attend in one layer of any batch, a row for each new token: q [rows, Hq * D], k and v
        [rows, Hkv, D]; returns [rows, Hq * Dv]."""
        lane, stock = self._lane_of(forward_batch.forward_mode), self._stock_of(forward_batch)
        # prompts expanded from latent KV are attended to in layers of the same ids
        dims = layer.qk_head_dim, layer.v_head_dim
        if layer.layer_id in self._stock_layers or dims != self._dims:
            return stock.forward(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
        return lane.forward(q, k, v, layer, forward_batch, save_kv_cache, stock, **kwargs)

    forward_extend = forward_decode

    # --- internals -------------------------------------------------------------------------------

    def _lane_of(self, mode) -> Lane:
        return self.decode if mode.is_decode() else self.extends.lane

    def _take(self, forward_batch) -> Lane:
        """Make the observed batch the active one, and return its lane."""
        lane = self._lane_of(forward_batch.forward_mode)
        other = self.extends.lane if lane is self.decode else self.decode
        other.reset()
        lane.take()
        return lane

    def _stock_of(self, forward_batch) -> AttentionBackend:
        """The stock backend of such a batch."""
        mode = forward_batch.forward_mode
        if mode.is_extend_without_speculative():
            return self._stock_extend
        if self._beside is not None and self.decode.is_captured:
            return self._beside
        return self._stock_verify if mode.is_target_verify() else self.stock

    def _take_up_stock_extend(self) -> None:
        """Have batches that FlashInfer extends and verifies slowly run what SGLang would choose."""
        kinds, default = self.extends.kinds, sglang_config.default_backend(self._runner.server_args)
        if self.fallback.name != default and kinds.any:
            extending = create_stock(self._runner, default)
            if kinds.prefill:
                self._stock_extend = extending
            if kinds.verify:
                self._stock_verify = extending

    def _graph_stocks(self) -> set[AttentionBackend]:
        """The stock backends that decode graphs are captured with."""
        return {self.stock, self._stock_verify} | ({self._beside} if self._beside else set())

    def _find_wrapper(self) -> None:
        """Run stock alone behind a wrapper that hides us from all hooks but the one that counts."""
        if self.can_run_prefix and find_backend(self._runner) is not self:
            wrapper = type(getattr(self._runner, "attn_backend", None)).__name__
            self._only_stock(f"wrapped_backend:{wrapper}")
            self._runner.prefix_attn_steps = self

    def _only_stock(self, reason: str) -> None:
        logger.warning("--attention-backend prefix: all steps run stock attention (%s)", reason)
        self._steps.only_stock(reason)
        self.extends.only_stock(reason)
