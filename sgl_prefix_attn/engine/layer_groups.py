"""The attention layers of a model in groups that are alike, and which group runs plans.

A plan serves layers with the same heads that attend to all tokens. A layer of any other group runs
the stock backend in every step, beside the plan of that step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sgl_prefix_attn.engine.reasons import first_of
from sgl_prefix_attn.execute.backends.kernel_backend import NARROW_KV, kv_dtype_label
from sgl_prefix_attn.ranges import in_short
from sgl_prefix_attn.records import HeadConfig

FULL, WINDOW, CHUNK = "full attention", "sliding window", "chunks"  # what a layer attends to


@dataclass(frozen=True)
class LayerTraits:
    """What the layers of a group have in common, with the heads of this rank.

    window           tokens before its own that a query sees; -1 where the window is no bound
    dtype, kv_dtype  of the model, and of its KV cache
    latent           the KV is one row a token, whose first v_head_dim elements are the value
    sinks            of what dtype a learned logit without a value joins each softmax; None: none
    cross_attention  the KV is that of an encoder
    transforms       logits are changed otherwise than by a tanh cap
    kv_scales        K or V is multiplied by a factor when it is read, and not divided by it before
    """

    kind: str
    window: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    latent: bool = False
    sinks: torch.dtype | None = None
    cross_attention: bool = False
    transforms: bool = False
    kv_scales: bool = False

    @property
    def heads(self) -> HeadConfig:
        latent_dim = self.v_head_dim if self.latent else None
        return HeadConfig(self.num_qo_heads, self.num_kv_heads, self.head_dim, latent_dim)


class LayerGroup(NamedTuple):
    """The layers of a model that share their traits; reason: why no plan serves them, or None."""

    traits: LayerTraits
    layer_ids: tuple[int, ...]
    reason: str | None = None

    def __str__(self) -> str:
        x = self.traits
        kind = f"{x.kind} of {x.window}" if x.window > -1 else x.kind
        return f"layers {in_short(self.layer_ids)} ({kind}, {x.heads})"


class LayerGroups(NamedTuple):
    """planned: the group that runs plans, None where there is none; left: those that do not."""

    planned: LayerGroup | None
    left: tuple[LayerGroup, ...]

    @property
    def every(self) -> tuple[LayerGroup, ...]:
        return self.left if self.planned is None else (self.planned, *self.left)

    @property
    def is_latent(self) -> bool:
        """Whether plans serve layers of latent attention."""
        return self.planned is not None and self.planned.traits.latent

    @property
    def problem(self) -> str | None:
        """Why no layer can run a plan, as a label of metrics, or None."""
        # SGLang's Transformers backend has layers that are no modules of the model.
        return None if self.planned else self.left_out or "layers:none"

    @property
    def left_out(self) -> str | None:
        """Why some layer cannot run a plan, as a label of metrics, or None."""
        return self.left[0].reason if self.left else None


def read(runner) -> LayerGroups:
    """Group the layers of a ModelRunner's model."""
    sinks = _sinks(runner)
    return divide({x.layer_id: _traits(runner, x, sinks) for x in attention_layers(runner)})


def attention_layers(runner) -> list[RadixAttention]:
    """Return the layers of a ModelRunner's model, of latent attention those that read the cache:
    prompts that are expanded to keys and values have a second layer of the same id."""
    layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    latent = {layer.layer_id for layer in layers if is_latent(runner, layer)}
    return [x for x in layers if x.layer_id not in latent or is_latent(runner, x)]


def is_latent(runner, layer: RadixAttention) -> bool:
    """Say whether a layer's KV is one latent row a token."""
    rank = getattr(runner.model_config, "kv_lora_rank", None)  # no other models have one
    return layer.tp_k_head_num == 1 and layer.v_head_dim == rank and layer.qk_head_dim >= rank


def divide(layers: Mapping[int, LayerTraits]) -> LayerGroups:
    """Group layers, by id, and choose the group that runs plans: among those that could, the one
    with the most layers."""
    members: dict[LayerTraits, list[int]] = {}
    for layer_id, traits in layers.items():
        members.setdefault(traits, []).append(layer_id)
    groups = [LayerGroup(x, tuple(ids), why_unplanned(x)) for x, ids in members.items()]
    able = [group for group in groups if group.reason is None]
    planned = max(able, key=lambda group: len(group.layer_ids), default=None)
    return LayerGroups(
        planned,
        # Planner, kernels and calibration are of one kind of heads.
        tuple(
            group._replace(reason=group.reason or "layers:different_heads")
            for group in groups
            if group is not planned
        ),
    )


def why_unplanned(traits: LayerTraits) -> str | None:
    """Say why no plan can serve layers with these traits, as a label of metrics, or None."""
    reasons = {
        "layers:head_dim": traits.head_dim != traits.v_head_dim and not traits.latent,
        # A window is short, so that few prefixes reach into it; slots of a pool for windows change
        # under a running request.
        "layers:sliding_window": traits.kind != FULL,
        "layers:cross_attention": traits.cross_attention,
        "layers:logit_transform": traits.transforms,
        kv_dtype_label(traits.kv_dtype): traits.kv_dtype
        not in (traits.dtype, traits.dtype if traits.latent else NARROW_KV),
        "kv_scales": traits.kv_scales,
    }
    return first_of(reasons)


def _traits(runner, layer: RadixAttention, sinks: torch.dtype | None) -> LayerTraits:
    dtype, kv_dtype, window = runner.dtype, runner.kv_cache_dtype, layer.sliding_window_size
    return LayerTraits(
        # Of Llama 4's layers those with rotary embeddings attend to chunks.
        kind=CHUNK if layer.use_irope else WINDOW if window > -1 else FULL,
        window=window,
        num_qo_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        latent=is_latent(runner, layer),
        sinks=sinks,
        cross_attention=layer.is_cross_attention,
        transforms=layer.logit_capping_method != "tanh"
        or layer.xai_temperature_len > 0
        or layer.pos_encoding_mode != "NONE",
        # SGLang divides where it converts.
        kv_scales=kv_dtype == dtype and is_scaled(layer),
    )


def _sinks(runner) -> torch.dtype | None:
    """The dtype of a model's sinks, which its attention gets in each step, None without any."""
    named = runner.model.named_parameters()
    found = {name.rpartition(".")[2]: weight.dtype for name, weight in named if "sink" in name}
    # SGLang says it of gpt-oss, not of the models of images that hold one.
    if not (runner.model_config.has_attention_sinks or "sinks" in found):
        return None
    return next(iter(found.values()), torch.bfloat16)


def is_scaled(layer: RadixAttention) -> bool:
    """Say whether K or V is multiplied when it is read: FP8 weights bring scales of 1 for a KV
    cache that is not FP8."""
    return any(value != 1.0 for value in _scales(layer))


def has_unknown_scales(layer: RadixAttention) -> bool:
    """Say whether KV is divided by a scale that readers on the host do not see: models set it so
    from --quantization-param-path."""
    return None in _scales(layer)


def _scales(layer: RadixAttention) -> list[float | None]:
    both = (layer.k_scale, layer.k_scale_float), (layer.v_scale, layer.v_scale_float)
    return [on_host for scale, on_host in both if scale is not None]
