"""Gives models of latent attention the name of SGLang's own backend in the place of ours."""

from sgl_prefix_attn.engine.latent_names import name_stock

TARGET = (
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup."
    "build_attention_backends"
)
TYPE = "after"
PARAMETERS = ("model_runner",)
WHY = "such a model chooses by the backend's name how a layer hands over queries and keys"


def hook(backends, *, model_runner, **_kwargs):
    """Rename the backend that build_attention_backends made, where ours is a part of it."""
    name_stock(model_runner, backends.attn_backend)
    return backends
