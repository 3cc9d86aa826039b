"""Launches of the kernel over latent KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sgl_prefix_attn.execute.backends.kernel_backend import (
    Capabilities,
    KernelBackend,
    resident_ctas,
)
from sgl_prefix_attn.execute.params import LayerParams, Workspace
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.kernels.latent.latent_attention import latent_tile_kernel
from sgl_prefix_attn.kernels.latent.latent_options import (
    MOST_HEADS,
    ROPE_DIM,
    VALUE_DIM,
    latent_build,
    latent_constants,
)
from sgl_prefix_attn.records import HeadConfig


@dataclass(frozen=True)
class LatentCapabilities(Capabilities):
    """Models that the kernel is built for: those with rows of one size."""

    def why_not(
        self, heads: HeadConfig, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if heads.latent_dim != VALUE_DIM:
            return f"latent_dim:{heads.latent_dim}"
        return super().why_not(heads, dtype, kv_dtype)


class LatentBackend(KernelBackend):
    """KernelBackend of Hopper GPUs over latent KV: one launch a layer, whatever the tree."""

    capabilities: ClassVar[Capabilities] = LatentCapabilities(
        head_dims=(VALUE_DIM + ROPE_DIM, VALUE_DIM + ROPE_DIM),
        group_sizes=(1, MOST_HEADS),
        dtypes=frozenset((torch.bfloat16,)),
        latent=True,
    )

    def __init__(self, heads: HeadConfig, dtype: torch.dtype, device: torch.device):
        super().__init__(heads, dtype, device, W.HALF_ROWS, resident_ctas(device))

    def forward(self, workspace: Workspace, layer: LayerParams) -> None:
        """Compute attention of one layer. Raises ValueError for a cap or sinks, which the kernel
        does not know."""
        if layer.soft_cap > 0 or layer.sinks is not None:
            raise ValueError("the kernel over latent KV knows neither a cap nor sinks")
        constants = latent_constants(self.heads.num_qo_heads, has_lse=layer.out_lse is not None)
        latent_tile_kernel[(self.num_sms,)](
            *latent_tensors(workspace, layer), *latent_scalars(layer), **constants, **latent_build()
        )


def latent_tensors(workspace: Workspace, layer: LayerParams) -> tuple[torch.Tensor, ...]:
    """Return the kernel's pointers, in their order."""
    return (
        *_queries(layer), layer.k_cache, layer.out,
        workspace.partial_state if layer.out_lse is None else layer.out_lse,
        workspace.partial_out, workspace.partial_state, workspace.counters, workspace.words,
        workspace.kv_indices, workspace.keys,
    )  # fmt: skip


def latent_scalars(layer: LayerParams) -> tuple[int | float, ...]:
    """Return its strides and the scale, in their order."""
    q, rope = _queries(layer)
    caches = layer.k_cache.stride(0), layer.out.stride(0)
    return *q.stride()[:2], *rope.stride()[:2], *caches, layer.sm_scale * layer.k_scale


def _queries(layer: LayerParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries in two parts, views of those in one piece."""
    if layer.q_rope is not None:
        return layer.q, layer.q_rope
    return layer.q[..., :VALUE_DIM], layer.q[..., VALUE_DIM:]
