"""What the policy needs to know about a model, read once from SGLang's ModelRunner."""

from __future__ import annotations

from sglang.srt.layers.radix_attention import RadixAttention

from sgl_prefix_attn.policy import ModelFacts
from sgl_prefix_attn.records import HeadConfig


def attention_layers(runner) -> list[RadixAttention]:
    return [module for module in runner.model.modules() if isinstance(module, RadixAttention)]


def head_config(runner) -> HeadConfig:
    """The heads that all layers of a supported model have on this rank."""
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
        kv_scales=any(x.k_scale is not None or x.v_scale is not None for x in layers),
        kv_dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        model_dtype=str(runner.dtype).removeprefix("torch."),
        device=runner.device,
        kv_pool=_pool_name(pool),
        parallel=_unsupported_parallelism(runner.server_args),
    )


def _pool_name(pool) -> str:
    name = type(pool).__name__
    layout = getattr(pool, "kv_cache_layout", "nhd")
    return name if layout == "nhd" else f"{name}/{layout}"


def _unsupported_parallelism(server_args) -> str | None:
    if server_args.dcp_size > 1:
        return "context"
    if server_args.enable_dp_attention:
        return "dp_attention"
    # Both decode with other backend instances than the one that the hook finds.
    if server_args.enable_two_batch_overlap:
        return "two_batch_overlap"
    if server_args.enable_pdmux:
        return "pdmux"
    return None
