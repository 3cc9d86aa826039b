"""One kind of batch on its way through the forward pass: over a plan, or by a stock backend.

Decode steps, batches of several tokens a request and rounds of a draft model each have a lane. What
was decided before the forward pass is observed, then active; a batch that runs stock attention is
None in both places.

    hook after ForwardBatch.init_new   observe                   what was decided
    before an eager pass               take, begin               load the plan
    before a graph                     take (or capture), load
    every layer                        forward                   write KV, run the plan
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_prefix_attn.engine import model_facts, sglang_config
from sgl_prefix_attn.engine.build import Execution, padding_plan
from sgl_prefix_attn.engine.cross_check import check_layer
from sgl_prefix_attn.engine.ranks import prepared
from sgl_prefix_attn.execute.backends.new_kv import store_narrow
from sgl_prefix_attn.execute.params import LayerParams
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.records import PREFIX, Decision
from sgl_prefix_attn.step.preparer import Step

logger = logging.getLogger(__name__)

_LATENT_OPTIONS = ("q_rope", "k_rope")


class Stock(NamedTuple):
    """What a lane needs of stock attention, and an AttentionBackend of SGLang's has: a batch's
    metadata of its ForwardBatch, and a layer of it."""

    init_forward_metadata: Callable[[Any], None]
    forward: Callable[..., torch.Tensor]


class Lane:
    """The batches of one kind, one at a time.

    runner      the ModelRunner whose KV they read
    execution   planner and kernels of their plans
    counters    count the layers that differ from stock attention
    kind        of the batches, for the log
    only_stock  called with a reason when no batch of the kind may run a plan any more
    """

    def __init__(
        self,
        runner,
        execution: Execution,
        counters: StepCounters,
        kind: str,
        only_stock: Callable[[str], None],
    ):
        self.executor = execution.executor
        self.observed: Step | None = None
        self.active: Step | None = None
        self._runner, self._heads, self._kind = runner, execution.planner.heads, kind
        self._sinks = model_facts.sinks_dtype(runner)
        self._counters = counters
        self._only_stock = only_stock
        self._capture = Step(Decision(PREFIX, "capture"), padding_plan(execution.planner))
        self._graph_out: Any = None

    @property
    def is_prefix(self) -> bool:
        """Whether the observed batch, or the one that runs now, is to run a plan."""
        return (self.observed or self.active) is not None

    @property
    def is_captured(self) -> bool:
        """Whether a graph with prefix kernels is being captured."""
        return self.active is self._capture

    @property
    def needs_eager_step(self) -> bool:
        """Whether the observed batch must not replay a graph, which holds one kind of kernels."""
        return self.observed is not None and self.observed.cross_check

    def reset(self) -> None:
        """Forget the batch before: none is observed."""
        self.observed = self.active = None

    def observe(self, prepare: Callable[[], Step | None]) -> Step | None:
        """Take what prepare() decides about the next batch, None where nothing is, and return it;
        as ranks.prepared()."""
        self.reset()
        step = prepared(self._kind, prepare, self._only_stock)
        if step is not None and step.is_prefix:
            self.observed = step
        return step

    def take(self) -> None:
        """Make the observed batch the active one; each is used once."""
        self.active, self.observed = self.observed, None

    def init_graphs(self, max_rows: int) -> None:
        """Make room for the graphs of up to so many rows that are about to be captured."""
        # Nothing writes padding rows: they must hold finite numbers, because a model may take
        # statistics over all rows (dynamic activation scales, expert routing).
        shape = (max_rows, self._heads.num_qo_heads, self._heads.value_dim)
        self._graph_out = torch.zeros(shape, dtype=self._runner.dtype, device=self._runner.device)

    def capture(self, with_plan: bool) -> None:
        """Make a capture the active batch: of the graph with prefix kernels, or of SGLang's own."""
        self.active = self._capture if with_plan else None

    def begin(
        self,
        forward_batch,
        stock: Stock | AttentionBackend,
        appends: bool = False,
        beside: bool = False,
    ) -> None:
        """Begin the active batch without a graph: load its plan, or take up stock attention.

        appends  the batch is a step that the loaded plan grows by
        beside   layers outside the plan run stock attention in any case
        """
        if self.active is None or self.active.cross_check or beside:
            stock.init_forward_metadata(forward_batch)
        if self.active is None:
            return
        try:
            self.load(forward_batch)
            if appends:
                self.append(forward_batch)
        except Exception as error:
            self.fail(error, forward_batch, stock)

    def load(self, forward_batch) -> None:
        """Load the active batch's plan where it has a new one."""
        step = self.active
        if step is not None and step.new_plan is not None:
            table = self._runner.req_to_token_pool.req_to_token
            self.executor.load(step.new_plan, table, forward_batch.req_pool_indices)
            if self._graph_out is not None:
                # what a larger batch left there need not be finite; a plan that is loaded for a
                # step without a graph may serve later ones from graphs
                self._graph_out[step.rows :] = 0

    def append(self, forward_batch) -> None:
        """Let the loaded plan grow by the batch's newest tokens."""
        self.executor.append(forward_batch.seq_lens, forward_batch.out_cache_loc)

    def forward(
        self,
        q,
        k,
        v,
        layer,
        forward_batch,
        save_kv_cache: bool,
        stock: Stock | AttentionBackend,
        *,
        first: Callable[[], None] = lambda: None,
        **kwargs,
    ):
        """Attend in one layer: q [..., Hq * D] or [..., Hq, D], k and v [..., Hkv, D]; returns
        [rows, Hq * Dv]. Of latent KV the last elements of q and k may be apart, as q_rope and
        k_rope.

        first  called before the kernels run
        """
        if self.active is not None and (option := self._unknown(**kwargs)):
            self.leave(f"layer_option:{option}", forward_batch, stock)
        if self.active is None:
            return stock.forward(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
        pool = self._runner.token_to_kv_pool
        if save_kv_cache and k is not None:
            self._write_kv(k, v, layer, forward_batch, kwargs.get("k_rope"))
        rest = kwargs.get("q_rope")
        k_scale, v_scale = _scales(layer)
        # Gemma 3 has another dimension before its rows.
        row = layer.tp_q_head_num, layer.head_dim if rest is None else layer.v_head_dim
        rows = q.reshape(-1, *row)
        out = self._output(rows, self.active)
        try:
            first()
            self.executor.run(
                LayerParams(
                    q=rows,
                    k_cache=pool.get_key_buffer(layer.layer_id),
                    v_cache=pool.get_value_buffer(layer.layer_id),
                    out=out,
                    out_lse=None,
                    sm_scale=layer.scaling,
                    soft_cap=layer.logit_cap,
                    sinks=kwargs.get("sinks"),
                    k_scale=k_scale,
                    v_scale=v_scale,
                    q_rope=None if rest is None else rest.reshape(*rows.shape[:2], -1),
                )
            )
        except Exception as error:
            self.fail(error, forward_batch, stock)
            return stock.forward(q, k, v, layer, forward_batch, save_kv_cache=False, **kwargs)
        out = out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
        if self.active.cross_check:
            expected = stock.forward(q, k, v, layer, forward_batch, save_kv_cache=False, **kwargs)
            check_layer(layer, out, expected, self._counters)
        return out

    def _write_kv(self, k, v, layer, forward_batch, k_rope) -> None:
        """Write KV [rows, Hkv, D] of a batch into the pool."""
        pool = self._runner.token_to_kv_pool
        if k_rope is not None:
            pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
            return
        if self._heads.latent_dim:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
            return
        if self._runner.kv_cache_dtype != self._runner.dtype:
            # SGLang takes more launches, and divides in place what stock attention of several
            # tokens a request may still read, in a check or after a failure.
            caches = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            store_narrow(k, v, *caches, forward_batch.out_cache_loc, *_scales(layer))
            return
        loc = KVWriteLoc(forward_batch.out_cache_loc)
        pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)

    def fail(self, error: Exception, forward_batch, stock: Stock | AttentionBackend) -> None:
        """Go on with stock attention after kernels that failed to compile or launch.

        Raises the error where that cannot be: in a capture (graph_variants.py sees to it), where
        the CUDA context is lost, and where other ranks would go on with plans.
        """
        if (
            self.is_captured
            or sglang_config.parallel().tp_size > 1
            or isinstance(error, torch.AcceleratorError)
        ):
            raise error
        logger.error("prefix kernels failed in %s: %s", self._kind, error, exc_info=error)
        self.leave("kernel_error", forward_batch, stock)

    def leave(self, reason: str, forward_batch, stock: Stock | AttentionBackend) -> None:
        """Run stock attention from here on, in the middle of a batch."""
        self._only_stock(reason)
        if not self.is_captured:
            # In a capture the stock graph of the same size has just left its metadata in place.
            stock.init_forward_metadata(forward_batch)
        self.active = None

    def _unknown(self, sinks=None, **options) -> str | None:
        """Name an option that a layer got at run time, and that the kernels were not built for or
        know nothing of; None without one."""
        if getattr(sinks, "dtype", None) != self._sinks:
            return "sinks"
        if self._heads.latent_dim:
            options = {name: x for name, x in options.items() if name not in _LATENT_OPTIONS}
        return min((name for name, value in options.items() if value is not None), default=None)

    def _output(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Return a layer's output [rows, Hq, Dv], whose padding rows hold finite numbers."""
        if self.is_captured:
            # One for all layers of a graph: a layer's is consumed before the next writes it.
            return self._graph_out[: len(q)]
        out = q.new_empty(*q.shape[:2], self._heads.value_dim)
        out[step.rows :] = 0
        return out


def _scales(layer) -> tuple[float, float]:
    """Return what a layer's keys and values are divided by in its KV cache."""
    both = layer.k_scale_float, layer.v_scale_float
    k_scale, v_scale = (1.0 if scale is None else scale for scale in both)
    return k_scale, v_scale
