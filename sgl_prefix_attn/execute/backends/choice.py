"""Which kernels a device can run: the one place that knows all backends."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton

from sgl_prefix_attn.execute.backends.family import HOPPER
from sgl_prefix_attn.execute.backends.kernel_backend import (
    NARROW_KV,
    Capabilities,
    KernelBackend,
    kv_dtype_label,
)
from sgl_prefix_attn.execute.backends.portable_backend import PortableBackend
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.records import HeadConfig

_HOPPER = (9, 0)
_PORTABLE_FROM = 8  # copies from memory to shared memory beside products
_E4M3_FROM = (8, 9)  # Triton converts it there


def why_no_hopper(
    device: torch.device,
    heads: HeadConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> str | None:
    """Say why a device cannot run a model's layers with Hopper's kernels, as a label, or None.

    kv_dtype: of the KV cache, None: like the model, here and below
    """
    if device.type != "cuda":
        return f"device:{device.type}"
    return why_no_hopper_on(torch.cuda.get_device_capability(device), heads, dtype, kv_dtype)


def why_no_hopper_on(
    capability: tuple[int, int],
    heads: HeadConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> str | None:
    """Say the same of GPUs of a compute capability, none of which need be here."""
    if capability != _HOPPER:
        return f"compute:{capability[0]}.{capability[1]}"
    try:
        # Gluon is experimental: a Triton in which it is another must not keep the others away.
        kind = _hopper_backend(heads)
    except Exception:
        return f"triton:{triton.__version__}"
    return kind.capabilities.why_not(heads, dtype, kv_dtype)


def _hopper_backend(heads: HeadConfig) -> type[KernelBackend]:
    """Return what runs Hopper's kernels for such heads. Raises whatever importing them does."""
    if heads.latent_dim is not None:
        from sgl_prefix_attn.execute.backends.latent_backend import LatentBackend

        return LatentBackend
    from sgl_prefix_attn.execute.backends.hopper_backend import HopperBackend

    return HopperBackend


def why_no_backend(
    device: torch.device,
    heads: HeadConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> str | None:
    """Say why no kernels of a device can run a model, as a label of metrics, or None."""
    if heads.latent_dim is not None and _runs_triton(device):
        return why_no_hopper(device, heads, dtype, kv_dtype)  # there are no portable ones
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        if major < _PORTABLE_FROM:
            return f"compute:{major}.{minor}"
        if kv_dtype == NARROW_KV and (major, minor) < _E4M3_FROM:
            return kv_dtype_label(kv_dtype)
    return capabilities_on(device).why_not(heads, dtype, kv_dtype)


def capabilities_on(device: torch.device) -> Capabilities:
    """Return what a device's kernels can run: whatever Hopper's can, the portable ones can, too,
    but for latent KV."""
    return (PortableBackend if _runs_triton(device) else TorchBackend).capabilities


def new_backend(
    family: str,
    device: torch.device,
    heads: HeadConfig,
    dtype: torch.dtype,
    pdl: bool = False,
    kv_dtype: torch.dtype | None = None,
    part_tokens: int = 0,
) -> KernelBackend:
    """Make what runs a family's kernels on the device, for one head configuration.

    pdl: launches of Hopper's are programmatic dependent ones, but over latent KV; part_tokens: of
    aligned plans, else 0. Raises ValueError naming what stands against the kernels on this device
    or for such layers.
    """
    if why_not := why_no_backend(device, heads, dtype, kv_dtype):
        raise ValueError(f"no kernels on {device.type} for {why_not}")
    if family == HOPPER:
        kind: Any = _hopper_backend(heads)
        if heads.latent_dim and part_tokens:
            raise ValueError("no kernels on GPUs for aligned plans over latent KV")
        options = {} if heads.latent_dim else {"pdl": pdl, "part_tokens": part_tokens}
        return kind(heads, dtype, device, **options)
    portable = PortableBackend if _runs_triton(device) else TorchBackend
    if why_not := portable.capabilities.why_not(heads, dtype, kv_dtype):
        raise ValueError(f"no portable kernels on {device.type} for {why_not}")
    return portable(heads, dtype, device, part_tokens=part_tokens)


def _runs_triton(device: torch.device) -> bool:
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
