"""Which kernels a device can run: the one place that knows all backends."""

import os

import torch
import triton

from sgl_prefix_attn.execute.backends.kernel_backend import KernelBackend
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.backends.triton_backend import TritonBackend
from sgl_prefix_attn.plan.tiles import TileSet
from sgl_prefix_attn.records import HeadConfig

_HOPPER = (9, 0)


def why_no_row_tiles(device: torch.device, heads: HeadConfig, dtype: torch.dtype) -> str | None:
    """Say why a device cannot run a model's layers as row tiles, as a label, or None."""
    if device.type != "cuda":
        return f"device:{device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != _HOPPER:
        return f"compute:{capability[0]}.{capability[1]}"
    try:
        # Gluon is experimental: a Triton in which it is another must not keep packs from running.
        from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend
    except Exception:
        return f"triton:{triton.__version__}"
    return GluonBackend.capabilities.why_not(heads, dtype)


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
