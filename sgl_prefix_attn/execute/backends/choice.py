"""Which kernels a device can run: the one place that knows all backends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import triton

from sgl_prefix_attn.execute.backends.kernel_backend import KernelBackend
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.backends.triton_backend import TritonBackend
from sgl_prefix_attn.plan.tiles import TileSet
from sgl_prefix_attn.records import HeadConfig

if TYPE_CHECKING:
    from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend

_HOPPER = (9, 0)


def why_no_row_tiles(device: torch.device, heads: HeadConfig, dtype: torch.dtype) -> str | None:
    """Say why a device cannot run a model's layers as row tiles, as a label, or None."""
    if device.type != "cuda":
        return f"device:{device.type}"
    return why_no_row_tiles_on(torch.cuda.get_device_capability(device), heads, dtype)


def why_no_row_tiles_on(
    capability: tuple[int, int], heads: HeadConfig, dtype: torch.dtype
) -> str | None:
    """Say the same of GPUs of a compute capability, none of which need be here."""
    if capability != _HOPPER:
        return f"compute:{capability[0]}.{capability[1]}"
    try:
        # Gluon is experimental: a Triton in which it is another must not keep packs from running.
        from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend
    except Exception:
        return f"triton:{triton.__version__}"
    return GluonBackend.capabilities.why_not(heads, dtype)


def row_tile_backend(device: torch.device, heads: HeadConfig, dtype: torch.dtype) -> GluonBackend:
    """Make what runs row tiles: their kernel on a Hopper GPU, torch on a CPU.

    Raises ValueError naming what stands against them on any other device or for such layers.
    """
    why_not = why_no_row_tiles(device, heads, dtype)
    if why_not not in (None, "device:cpu"):
        raise ValueError(
            f"several query tokens a request need a Hopper GPU (sm_90) or a CPU; here: {why_not}"
        )
    from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend
    from sgl_prefix_attn.execute.backends.torch_row_tiles import TorchRowTiles

    return (GluonBackend if why_not is None else TorchRowTiles)(heads, dtype, device)


def backend_class(device: torch.device) -> type[TritonBackend] | type[TorchBackend]:
    """Return what runs packs: Triton on a GPU and under TRITON_INTERPRET=1, torch elsewhere."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return TritonBackend
    return TorchBackend


def why_no_backend(device: torch.device, heads: HeadConfig, dtype: torch.dtype) -> str | None:
    """Say why no kernels of a device can run a model, as a label of metrics, or None."""
    return backend_class(device).capabilities.why_not(heads, dtype)


def new_backend(
    device: torch.device, heads: HeadConfig, dtype: torch.dtype, tile_set: TileSet
) -> KernelBackend:
    """Make what runs packs on the device, for one head configuration."""
    if backend_class(device) is TritonBackend:
        return TritonBackend(heads, tile_set, dtype, device)
    return TorchBackend(heads, dtype, device)
