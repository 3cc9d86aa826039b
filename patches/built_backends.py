"""Takes SGLang's pair of backends apart where no batch runs plans, and gives models of latent
attention the name of SGLang's own backend in the place of ours."""

from sgl_prefix_attn.engine.shown_backend import name_stock, unpaired

TARGET = (
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup."
    "build_attention_backends"
)
TYPE = "after"
PARAMETERS = ("model_runner",)
WHY = "models ask their backend what it is, and how a layer hands over queries and keys"


def hook(backends, *, model_runner, **_kwargs):
    """Return the backends that build_attention_backends made, as the model is to see them."""
    backends = unpaired(model_runner, backends)
    name_stock(model_runner, backends.attn_backend)
    return backends
