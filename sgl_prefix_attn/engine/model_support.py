"""Models that no setting makes servable, told before their weights are loaded."""

from __future__ import annotations

from sgl_prefix_attn.settings import BACKEND_NAME


def raise_if_unsupported(model_config) -> None:
    """Raise ValueError for a model that the backend cannot serve at all."""
    from sglang.srt.configs.model_config import AttentionArch

    if model_config.attention_arch == AttentionArch.MLA:
        what = "uses multi-head latent attention (MLA)"
    elif model_config.is_encoder_decoder:
        what = "is an encoder-decoder model"
    else:
        return
    architectures = ", ".join(getattr(model_config.hf_config, "architectures", None) or [])
    raise ValueError(
        f"--attention-backend {BACKEND_NAME}: {architectures} {what}; supported are decoder-only "
        "models with multi-head or grouped-query attention. Leave --attention-backend out to take "
        "SGLang's default."
    )
