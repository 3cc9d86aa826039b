"""Which draft models get plans for their decode steps, and why the others do not."""

import logging
from dataclasses import replace

import torch

from sgl_prefix_attn.engine import model_facts, sglang_config
from sgl_prefix_attn.engine.build import NoKernels, build
from sgl_prefix_attn.engine.counters_of import counters_of
from sgl_prefix_attn.engine.extends import PlannedKinds
from sgl_prefix_attn.engine.planned_drafts import PlannedDrafts
from sgl_prefix_attn.records import FA3, FLASHINFER, PREFIX, STOCK
from sgl_prefix_attn.settings import Settings

logger = logging.getLogger(__name__)

# Backends of draft steps for which FlashInfer's times, which the policy knows, are near enough.
# FlashAttention 3 takes as long in the median of eval/results/kernel_*.json; where it is
# more than 3 % faster, plans are faster still, or nothing is shared.
TIMED = (None, FLASHINFER, FA3)


def plan_drafts(runner, stock):
    """Return the backend of a draft model's decode steps: `stock`, SGLang's own, with plans beside
    it where batches that verify may run plans and the draft model allows its own.

    runner  the draft model's ModelRunner

    Raises as build() does, but for NoKernels.
    """
    settings = Settings.from_env()
    if not PlannedKinds.of(runner.server_args, settings).verify:
        return stock
    if (why_not := why_stock(runner, settings)) is not None:
        return _left_alone(stock, why_not)
    settings = replace(settings, dump="")  # dumps are of decisions about the target model
    # The plan of a round holds its first step's tokens, and grows by those of the others.
    of_a_round = replace(settings, headroom=len(stock.attn_backends) - 1)
    try:
        execution = build(runner, model_facts.head_config(runner), of_a_round, FLASHINFER)
    except NoKernels as none:
        return _left_alone(stock, str(none))
    counters = counters_of(runner, model_facts.planned_layers(runner))
    logger.info("--attention-backend prefix: decode steps of the draft model run plans")
    return PlannedDrafts(runner, stock, execution, settings, counters)


def why_stock(runner, settings: Settings) -> str | None:
    """Say why no decode step of a draft model that drafts chains can run a plan, or None."""
    algorithm = model_facts.speculative(runner.server_args)
    options = sglang_config.options(runner.server_args)
    if settings.policy == STOCK:
        return "forced"
    if options.speculative_draft_window_size:
        return "draft_window"  # SGLang's draft backends then read less than all
    model = model_facts.unsupported_model(runner)
    if model not in (None, algorithm):
        return model
    if (why_not := model_facts.unsupported_extend(runner)) is not None:
        return why_not
    asked = options.speculative_draft_attention_backend
    on_gpu = torch.device(runner.device).type != "cpu"
    if on_gpu and settings.policy != PREFIX and asked not in TIMED:
        return f"draft_backend:{asked}"
    return model_facts.why_no_kernels(runner)


def _left_alone(stock, why_not: str):
    logger.info("--attention-backend prefix: the draft model runs stock kernels (%s)", why_not)
    return stock
