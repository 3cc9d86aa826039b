"""What models of latent attention are told of their attention backend.

By its name they choose between absorbed attention and expanded prompts, and whether queries and
keys come in one piece. Ours takes either, and what runs stock batches, or the whole model, is
SGLang's own: so they see the name of that.
"""

from sgl_prefix_attn.settings import BACKEND_NAME

_NAMES = ("prefill_attention_backend_str", "decode_attention_backend_str")


def name_stock(runner, backend) -> None:
    """Name a ModelRunner's backend as the one that serves its stock batches, where the model has
    latent attention and ours is named; the hooks call this in every server."""
    if getattr(runner.model_config, "kv_lora_rank", None) is None:
        return
    if BACKEND_NAME not in (getattr(backend, name) for name in _NAMES):
        return
    from sgl_prefix_attn.engine import sglang_config

    own = sglang_config.default_backend(runner.server_args)
    for name in _NAMES:
        if getattr(backend, name) == BACKEND_NAME:
            setattr(backend, name, own)
