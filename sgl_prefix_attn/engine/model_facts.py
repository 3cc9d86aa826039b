"""What the policy needs to know about a model, read once from SGLang's ModelRunner."""

from __future__ import annotations

from sglang.srt.layers.radix_attention import RadixAttention

from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.step.policy import ModelFacts


def attention_layers(runner) -> list[RadixAttention]:
    return [module for module in runner.model.modules() if isinstance(module, RadixAttention)]


def head_config(runner) -> HeadConfig:
    """Return the heads that all layers of a supported model have on this rank."""
    layer = attention_layers(runner)[0]
    return HeadConfig(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)


def model_facts(runner) -> ModelFacts:
    layers = attention_layers(runner)
    pool = runner.token_to_kv_pool
    return ModelFacts(
        head_configs=len(
            {(x.tp_q_head_num, x.tp_k_head_num, x.qk_head_dim, x.v_head_dim) for x in layers}
        ),
        equal_head_dims=all(x.qk_head_dim == x.v_head_dim for x in layers),
        sliding_window=any(x.sliding_window_size > -1 or x.use_irope for x in layers),
        cross_attention=any(x.is_cross_attention for x in layers),
        logit_transform=any(
            x.logit_capping_method != "tanh"
            or x.xai_temperature_len > 0
            or x.pos_encoding_mode != "NONE"
            for x in layers
        ),
        kv_scales=any(_is_scaled(x) for x in layers),
        kv_dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        model_dtype=str(runner.dtype).removeprefix("torch."),
        kv_pool=_pool_name(pool),
        server=unsupported_server(runner.server_args),
    )


def _pool_name(pool) -> str:
    name = type(pool).__name__
    layout = getattr(pool, "kv_cache_layout", "nhd")
    return name if layout == "nhd" else f"{name}/{layout}"


def _is_scaled(layer: RadixAttention) -> bool:
    """FP8 weights bring scales of 1 for a KV cache that is not FP8."""
    scales = ((layer.k_scale, layer.k_scale_float), (layer.v_scale, layer.v_scale_float))
    return any(scale is not None and value != 1.0 for scale, value in scales)


def unsupported_server(server_args) -> str | None:
    """Say which option of the server rules prefix kernels out, or None."""
    if server_args.dcp_size > 1:
        return "parallel:context"
    if server_args.enable_dp_attention:
        return "parallel:dp_attention"
    # Its microbatches take turns on one backend, which holds one plan.
    if server_args.pp_size > 1:
        return "parallel:pipeline"
    # Both decode with other backend instances than the one that the hook finds.
    if server_args.enable_two_batch_overlap:
        return "parallel:two_batch_overlap"
    if server_args.enable_pdmux:
        return "parallel:pdmux"
    # The target model verifies and never decodes.
    if server_args.speculative_algorithm is not None:
        return f"speculative:{server_args.speculative_algorithm}"
    # Never tried: the launches of a plan would be traced.
    if server_args.enable_torch_compile:
        return "torch_compile"
    return None
