"""What models are shown of their attention backend, by the hooks, in every server.

Some ask it what it is: models of latent attention choose by its name between absorbed attention and
expanded prompts, and whether queries and keys come in one piece; DSA asks whether a prompt is
expanded. Ours takes either, and what runs stock batches, or the whole model, is SGLang's own.
"""

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.engine.runner_backend import find_backend
from sgl_prefix_attn.settings import BACKEND_NAME

_NAMES = ("prefill_attention_backend_str", "decode_attention_backend_str")


def unpaired(runner, backends):
    """Return the AttentionBackends of a ModelRunner with one backend in the place of a pair for
    prefill and decode, which answers nothing, where SGLang's own serves both by itself
    (stock_alone.py)."""
    pair = backends.attn_backend
    alone = getattr(runner, "prefix_attn_steps", None) is not None
    if not alone or type(pair).__name__ != "HybridAttnBackend" or find_backend(runner, pair):
        return backends
    import msgspec

    own = sglang_config.default_backend(runner.server_args)
    if pair.prefill_attention_backend_str != own:
        return backends  # another was asked for
    for name in _NAMES:
        setattr(pair.decode_backend, name, own)
    return msgspec.structs.replace(backends, attn_backend=pair.decode_backend)


def name_stock(runner, backend) -> None:
    """Name a ModelRunner's backend as the one that serves its stock batches, where the model has
    latent attention and ours is named, or nothing is: those of two overlapping batches, until
    0.5.18."""
    if getattr(runner.model_config, "kv_lora_rank", None) is None:
        return
    for name in _NAMES:
        if getattr(backend, name) == BACKEND_NAME:
            own = sglang_config.default_backend(runner.server_args)
            setattr(backend, name, own)
            for child in getattr(backend, "children", ()):
                setattr(child, name, own)


def name_drafts(factory, backend) -> None:
    """Name the backend that a DraftBackendFactory made, and those of its steps, as what they are,
    where SGLang leaves that out (0.5.17): models would take them for ours."""
    asked = factory.draft_attn_backend  # start_checks.keep_stock_drafts
    server_args = factory.draft_model_runner.server_args  # only 0.5.17's factory has them
    if not asked or BACKEND_NAME not in sglang_config.attention_backends(server_args):
        return
    for one in (backend, *getattr(backend, "attn_backends", ())):
        for name in _NAMES:
            if one is not None and getattr(one, name, None) is None:
                setattr(one, name, asked)
