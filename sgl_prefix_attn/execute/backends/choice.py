"""Which kernels a device runs: the one place that knows all families."""

from __future__ import annotations

import os

import torch

from sgl_prefix_attn.execute.backends.kernel_backend import KernelBackend
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.backends.triton_backend import TritonBackend
from sgl_prefix_attn.plan.tiles import TileSet
from sgl_prefix_attn.records import HeadConfig


def backend_class(device: torch.device) -> type[TritonBackend] | type[TorchBackend]:
    """Triton on a GPU and under TRITON_INTERPRET=1, torch elsewhere."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return TritonBackend
    return TorchBackend


def why_no_backend(device: torch.device, heads: HeadConfig, dtype: torch.dtype) -> str | None:
    """Say why the kernels of a device cannot run a model, as a label of metrics, or None."""
    return backend_class(device).capabilities.why_not(heads, dtype)


def new_backend(
    device: torch.device, heads: HeadConfig, dtype: torch.dtype, tile_set: TileSet
) -> KernelBackend:
    """Make the device's kernels for one head configuration."""
    if backend_class(device) is TritonBackend:
        return TritonBackend(heads, tile_set, dtype, device)
    return TorchBackend(heads, dtype, device)
