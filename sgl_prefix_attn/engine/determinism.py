"""Deterministic inference: decode steps whose results do not depend on what else their batch holds.

All decode steps run aligned plans then (plan/aligned.py), by kernels that sum each row by itself,
whatever else may be faster; stock kernels run only a step that could not be planned, which is
logged and counted. Prefill is the stock backend's, as SGLang's deterministic mode has it, or all of
it runs such plans, too: then a token has the same results in a prompt, behind a cached prefix, in a
chunk and in a decode step.
"""

from dataclasses import replace

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.engine.reasons import first_of
from sgl_prefix_attn.records import CALIBRATED, PREFIX, STOCK
from sgl_prefix_attn.settings import BACKEND_NAME, Settings

# KV positions of a part: a prefix is split alike in every batch, however few CTAs have work.
PART_TOKENS = 2048


def is_on(server_args) -> bool:
    """Tell whether a server was asked for deterministic inference, also by rl_on_policy_target."""
    return bool(sglang_config.options(server_args).enable_deterministic_inference)


def part_tokens(server_args) -> int:
    """Return the KV positions of a part of a server's plans, 0 where they need not be aligned."""
    return PART_TOKENS if is_on(server_args) else 0


def settings_of(server_args, settings: Settings) -> Settings:
    """Return the settings by which a server decides: a plan for each decode step."""
    return replace(settings, policy=PREFIX) if is_on(server_args) else settings


def why_not(server_args, settings: Settings) -> str | None:
    """Say why deterministic inference cannot be served over plans, or None."""
    options = sglang_config.options(server_args)
    prefill, _ = sglang_config.attention_backends(server_args)
    reasons = {
        "prompts run plans with PREFIX_ATTN_PREFILL=1; without it, name it for decode alone": (
            prefill == BACKEND_NAME and not settings.prefill
        ),
        "a full prefill graph holds attention, which then is stock": (
            prefill == BACKEND_NAME and sglang_config.prefill_graph(server_args) == "full"
        ),
        "drafts are verified by other kernels than those of decode steps": (
            options.speculative_algorithm is not None
        ),
        "the radix cache is off, so no KV is shared": options.disable_radix_cache,
        "PREFIX_ATTN_POLICY=stock runs no plans": settings.policy == STOCK,
        f"PREFIX_ATTN_MAX_VARIANT_BS={settings.max_variant_bs} leaves larger batches to others": (
            settings.max_variant_bs < Settings.max_variant_bs
        ),
        f"PREFIX_ATTN_STRATEGY={settings.strategy} splits prefixes by who shares them": (
            settings.strategy != CALIBRATED
        ),
    }
    return first_of(reasons)


def raise_if_stock_alone(server_args, reason: str) -> None:
    """Raise ValueError where no decode step of a deterministic server can run a plan."""
    if is_on(server_args):
        raise ValueError(
            f"--enable-deterministic-inference cannot be served with `{BACKEND_NAME}`: no plan can "
            f"serve this model or server ({reason}). Leave `{BACKEND_NAME}` out to run "
            f"{sglang_config.default_backend(server_args)}"
        )


def raise_if_prompts_are_stock(server_args, reason: str | None) -> None:
    """Raise ValueError where a deterministic server's prompts are to run plans and cannot, for such
    a reason (None: they can)."""
    if is_on(server_args) and reason is not None:
        raise ValueError(
            f"PREFIX_ATTN_PREFILL=1: no plan can serve this model's prompts ({reason}). Unset it "
            f"and name `{BACKEND_NAME}` for decode alone"
        )


def most_prompt_tokens(runner) -> int:
    """Return how many tokens a deterministic server's extend batches have at most, those of
    requests that decode in them included."""
    options = sglang_config.options(runner.server_args)
    chunk = options.chunked_prefill_size or 0
    if chunk <= 0:
        chunk = max(options.max_prefill_tokens, runner.model_config.context_len)
    return chunk + runner.req_to_token_pool.size * bool(options.enable_mixed_chunk)


def choose_on_a_cpu(server_args) -> None:
    """Have SGLang take torch_native, which attends request by request, where a server without a GPU
    is to be deterministic; it would choose a GPU's backend, and refuse this one by name."""
    from sglang.srt import server_args as choices

    asked = server_args.enable_deterministic_inference or server_args.rl_on_policy_target
    if asked and server_args.attention_backend in (None, "torch_native"):
        choices.add_deterministic_attention_backend_choices(["torch_native"])
        choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
        if server_args.attention_backend is None:  # arguments that were resolved are read-only
            server_args.attention_backend = "torch_native"
