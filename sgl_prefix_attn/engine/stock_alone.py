"""Models of which no batch can run a plan: SGLang's own backend serves them, by itself.

It is the one that SGLang would have chosen on this GPU for this model, and no other object stands
between: it knows the model's windows, chunks and sinks, which another backend need not. Decode
steps are counted all the same, under the reason.
"""

import logging

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sgl_prefix_attn.engine import model_facts, sglang_config
from sgl_prefix_attn.engine.asked_tokens import decode_step
from sgl_prefix_attn.engine.counters_of import counters_of
from sgl_prefix_attn.engine.extends import PlannedKinds
from sgl_prefix_attn.engine.fallback import create_stock
from sgl_prefix_attn.engine.layer_groups import attention_layers
from sgl_prefix_attn.engine.ranks import prepared
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.settings import BACKEND_NAME, Settings
from sgl_prefix_attn.step.preparer import StepPreparer

logger = logging.getLogger(__name__)


def why_stock_alone(runner, settings: Settings) -> str | None:
    """Say why no batch of a model can run a plan, as a label of metrics, or None."""
    problem = model_facts.unsupported_model(runner)
    speculates = model_facts.speculative(runner.server_args)
    if problem not in (None, speculates):
        return problem
    if (no_kernels := model_facts.why_no_kernels(runner)) is not None:
        return no_kernels
    if speculates is None:
        return None
    # A target model that verifies never decodes, but its other batches may run plans.
    return None if PlannedKinds.of(runner.server_args, settings).any else speculates


def serve_alone(runner, settings: Settings, reason: str) -> AttentionBackend:
    """Return SGLang's own choice for this model, whose decode steps the hook on batches counts."""
    name = sglang_config.default_backend(runner.server_args)
    if sglang_config.parallel().tp_rank == 0:
        logger.warning(
            "--attention-backend %s: every step runs SGLang's own %s (%s)",
            BACKEND_NAME,
            name,
            reason,
        )
    runner.prefix_attn_steps = StockSteps(runner, settings, reason)
    runner.prefix_attn_steps.counters.fallback(name, reason)
    return create_stock(runner, name)


class StockSteps:
    """Counts the decode steps of a runner that SGLang's own backend serves by itself."""

    def __init__(self, runner, settings: Settings, reason: str):
        counters = counters_of(runner, attention_layers(runner))
        self._steps = StepPreparer(settings, None, counters, problem=reason)
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._counts = True

    @property
    def counters(self) -> StepCounters:
        return self._steps.counters

    def observe(self, forward_batch, schedule_batch) -> None:
        """Count the step that SGLang is about to run (after ForwardBatch.init_new)."""
        if self._counts:
            prepared(
                "a decode step",
                lambda: decode_step(self._steps, forward_batch, schedule_batch, self._req_to_token),
                self._stop,
            )

    def _stop(self, reason: str) -> None:
        logger.warning("decode steps are no longer counted (%s)", reason)
        self._counts = False
