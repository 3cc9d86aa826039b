"""Which kernels a device runs: the one place that knows all families.

A family is kernels and the planner whose words they read. Row tiles are Hopper's (gluon_backend.py,
plan/row_tile_planner.py); packs run on any GPU by Triton and elsewhere in torch (triton_backend.py,
torch_backend.py, plan/), and whatever row tiles can run they can run, too.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton

from sgl_prefix_attn.execute.backends.kernel_backend import KernelBackend
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.backends.triton_backend import TritonBackend
from sgl_prefix_attn.plan.tiles import TileSet
from sgl_prefix_attn.records import HeadConfig

_HOPPER = (9, 0)

# As SGL_PREFIX_ATTN_KERNELS names the families; TRITON's words are run by torch on a CPU.
AUTO, ROW_TILES, TRITON = "auto", "row_tiles", "triton"


class Family(NamedTuple):
    """name: ROW_TILES or TRITON; why_not: what stands against row tiles, as a label, or None."""

    name: str
    why_not: str | None = None

    def __str__(self) -> str:
        if self.name == ROW_TILES:
            return "row tiles (Gluon, sm_90)"
        return f"packs (Triton, torch on a CPU), no row tiles ({self.why_not})"


def choose_family(wanted: str, strategy: str, why_not_here: str | None) -> Family:
    """Choose what a server's prefix steps run.

    wanted        AUTO, ROW_TILES or TRITON
    strategy      of the packing: row tiles have but the one, the others are ablations of packs
    why_not_here  why_no_row_tiles() of its device and model

    Raises ValueError when row tiles are wanted and cannot run.
    """
    if wanted == TRITON:
        return Family(TRITON, "kernels:triton")
    why_not = why_not_here
    if why_not is None and strategy != "calibrated":
        why_not = f"strategy:{strategy}"
    if why_not is None:
        return Family(ROW_TILES)
    if wanted == ROW_TILES:
        raise ValueError(
            f"SGL_PREFIX_ATTN_KERNELS=row_tiles: row tiles cannot run here ({why_not}); unset it, "
            "or remove what stands against them"
        )
    return Family(TRITON, why_not)


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
