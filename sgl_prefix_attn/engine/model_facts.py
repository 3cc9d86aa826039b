"""What SGLang's ModelRunner says about a model's attention layers, and why they cannot be run."""

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.step.policy import PLAN_US

# Whose draft models run decode steps of their own, as speculative() names them.
DRAFT_IN_STEPS = ("speculative:EAGLE", "speculative:EAGLE3", "speculative:STANDALONE")


def attention_layers(runner) -> list[RadixAttention]:
    return [module for module in runner.model.modules() if isinstance(module, RadixAttention)]


def least_saving_us(runner, passes: int = 1) -> float:
    """Return what a plan must save per layer that serves so many passes of the model: what it costs
    the host."""
    return PLAN_US / (len(attention_layers(runner)) * passes)


def head_config(runner) -> HeadConfig:
    """Return the heads that all layers of a supported model have on this rank."""
    layer = attention_layers(runner)[0]
    return HeadConfig(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)


def unsupported_model(runner) -> str | None:
    """Say why no step of this model can run the prefix kernels, or None."""
    layers = attention_layers(runner)
    heads = {(x.tp_q_head_num, x.tp_k_head_num, x.qk_head_dim, x.v_head_dim) for x in layers}
    pool, kv_dtype = _pool_name(runner.token_to_kv_pool), runner.kv_cache_dtype
    reasons = {
        # None of them is a module of the model in SGLang's Transformers backend.
        "layers:none": not layers,
        "layers:different_heads": len(heads) > 1,
        "layers:head_dim": any(x.qk_head_dim != x.v_head_dim for x in layers),
        "layers:sliding_window": any(x.sliding_window_size > -1 or x.use_irope for x in layers),
        "layers:cross_attention": any(x.is_cross_attention for x in layers),
        "layers:logit_transform": any(
            x.logit_capping_method != "tanh"
            or x.xai_temperature_len > 0
            or x.pos_encoding_mode != "NONE"
            for x in layers
        ),
        unsupported_server(runner.server_args): True,
        f"kv_dtype:{str(kv_dtype).removeprefix('torch.')}": kv_dtype != runner.dtype,
        "kv_scales": any(_is_scaled(x) for x in layers),
        f"kv_pool:{pool}": pool != "MHATokenToKVPool",
        speculative(runner.server_args): True,  # the last: without another, chains are verified
    }
    return next((reason for reason, holds in reasons.items() if holds and reason), None)


def unsupported_extend(runner) -> str | None:
    """Say why no extend batch of a model that decodes over plans can run one, or None."""
    bidirectional = any(x.attn_type != AttentionType.DECODER for x in attention_layers(runner))
    return "layers:bidirectional" if bidirectional else None


def _pool_name(pool) -> str:
    name = type(pool).__name__
    layout = getattr(pool, "kv_cache_layout", "nhd")
    return name if layout == "nhd" else f"{name}/{layout}"


def _is_scaled(layer: RadixAttention) -> bool:
    """FP8 weights bring scales of 1 for a KV cache that is not FP8."""
    scales = ((layer.k_scale, layer.k_scale_float), (layer.v_scale, layer.v_scale_float))
    return any(scale is not None and value != 1.0 for scale, value in scales)


def speculative(server_args) -> str | None:
    """Name the speculative decoding of a server, whose target model verifies and never decodes."""
    algorithm = sglang_config.options(server_args).speculative_algorithm
    return None if algorithm is None else f"speculative:{algorithm}"


def verifies_chains(server_args) -> bool:
    """Say whether every draft that the target model verifies is a chain, which takes no mask."""
    options = sglang_config.options(server_args)
    return speculative(server_args) in DRAFT_IN_STEPS and options.speculative_eagle_topk == 1


def no_draft_steps(server_args) -> str | None:
    """Say why a draft model has no decode steps that plans could serve; None where it has, and
    without a draft model."""
    options, algorithm = sglang_config.options(server_args), speculative(server_args)
    if algorithm in (None, "speculative:NGRAM"):
        return None
    if getattr(options, "enable_multi_layer_eagle", False):
        return "multi_layer"  # each layer drafts a token, and none decodes
    if algorithm not in DRAFT_IN_STEPS:
        return algorithm
    return "one_step" if options.speculative_num_steps == 1 else None


def unsupported_server(server_args) -> str | None:
    """Say which option of the server rules prefix kernels out, or None.

    The layout of ranks is asked of the options, too: where SGLang makes a draft model's backends,
    what it says of this process is the draft model's own.
    """
    ranks, given = sglang_config.parallel(), sglang_config.options(server_args)
    attention_ranks = max(ranks.attn_dp_size, getattr(given, "attn_dp_size", None) or 1)
    pipeline_ranks = max(ranks.pp_size, getattr(given, "pp_size", None) or 1)
    reasons = {
        "parallel:context": ranks.dcp_enabled,
        # --enable-dp-attention; from 0.5.22 on --attn-dp-size is enough.
        "parallel:dp_attention": attention_ranks > 1 or given.enable_dp_attention,
        # One request's KV pages lie on several ranks (from 0.5.21 on).
        "parallel:kv_cache_sharding": getattr(given, "enable_kv_cache_sharding", False),
        # Its microbatches take turns on one backend, which holds one plan.
        "parallel:pipeline": pipeline_ranks > 1,
        # Both decode with other backend instances than the one that the hook finds.
        "parallel:two_batch_overlap": given.enable_two_batch_overlap,
        "parallel:pdmux": given.enable_pdmux,
        # Never tried: the launches of a plan would be traced.
        "torch_compile": given.enable_torch_compile,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
