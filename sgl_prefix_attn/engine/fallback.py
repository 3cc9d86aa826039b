"""Which of SGLang's own backends decodes what no plan does: one for a server, composed at start."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sgl_prefix_attn.engine import determinism, layer_groups, sglang_config
from sgl_prefix_attn.engine.layer_groups import CHUNK, WINDOW, LayerTraits
from sgl_prefix_attn.engine.reasons import first_of
from sgl_prefix_attn.records import FLASHINFER
from sgl_prefix_attn.settings import Settings


class Fallback(NamedTuple):
    """name: SGLang's of the backend; reason: why it is this one, as a label of metrics."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose(
    asked: str,
    default: str,
    on_gpu: bool,
    layers: Sequence[LayerTraits],
    deterministic: bool = False,
) -> Fallback:
    """Choose between FlashInfer and SGLang's default.

    asked    PREFIX_ATTN_FALLBACK
    default  the backend that SGLang chose for the model, or was told to take
    layers   each kind that the model has
    deterministic  whether results may depend on a request alone, as the default's do then

    Raises ValueError where FlashInfer is asked for and cannot run.
    """
    against = why_no_flashinfer(layers) if on_gpu else "device:cpu"
    if deterministic and against is None and default != FLASHINFER:
        against = "deterministic"
    if asked == FLASHINFER:
        if against is not None:
            raise ValueError(
                f"PREFIX_ATTN_FALLBACK={FLASHINFER}: it cannot serve this model here ({against}). "
                f"Unset it to run {default}, SGLang's default"
            )
        return Fallback(FLASHINFER, "asked")
    if asked == "default":
        return Fallback(default, "asked")
    return Fallback(FLASHINFER, "usual") if against is None else Fallback(default, against)


def why_no_flashinfer(layers: Sequence[LayerTraits]) -> str | None:
    """Say what SGLang's FlashInfer backend does not know of a model's layers, or None."""
    reasons = {
        "layers:chunks": any(x.kind == CHUNK for x in layers),
        "layers:sinks": any(x.sinks is not None for x in layers),
        # It plans one window, which not every model tells its runner (Cohere's do not), and SGLang
        # keeps it from some models with windows; it plans one number of heads for all layers.
        "layers:windows": any(x.kind == WINDOW for x in layers),
        "layers:different_heads": len({x.heads for x in layers}) > 1,
        # Its kernels are wrong, or read what is not theirs, for others: 80 and 96, say.
        "layers:head_dim": any(
            not x.latent and (x.head_dim != x.v_head_dim or x.head_dim not in (64, 128, 256))
            for x in layers
        ),
        "layers:logit_transform": any(x.transforms for x in layers),
        # By the name of its backend, the default's (shown_backend.py), the model lays out what it
        # hands to a layer.
        "layers:latent": any(x.latent for x in layers),
    }
    return first_of(reasons)


def of(runner, settings: Settings) -> Fallback:
    """Choose that of a ModelRunner's server. Raises ValueError as choose() does."""
    return choose(
        settings.fallback,
        sglang_config.default_backend(runner.server_args),
        torch.device(runner.device).type == "cuda",
        [group.traits for group in layer_groups.read(runner).every],
        determinism.is_on(runner.server_args),
    )


def create_stock(runner, name: str) -> AttentionBackend:
    """Make SGLang's own backend of that name."""
    return ATTENTION_BACKENDS[name](runner)
