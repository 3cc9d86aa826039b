"""Which tiles and costs a device gets: shipped defaults, until it is calibrated."""

from __future__ import annotations

import torch

from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.tiles import TileConfig, TileSet
from sgl_prefix_attn.records import HeadConfig

# Chosen on an H100 (docs/kernel-log.md).
GPU_TILES = (
    TileConfig(16, 64, num_warps=4, num_stages=3),
    TileConfig(64, 64, num_warps=4, num_stages=3),
    TileConfig(128, 64, num_warps=8, num_stages=3),
)
CPU_TILES = (TileConfig(16, 32), TileConfig(32, 32), TileConfig(64, 32))
CTAS_PER_SM = 2
CPU_CTAS = 8


def default_tile_set(device: torch.device | str) -> TileSet:
    """Tiles for a device; on a CPU a small set, so that splits and row tiles are exercised."""
    device = torch.device(device)
    if device.type != "cuda":
        return TileSet(CPU_TILES, num_ctas=CPU_CTAS)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return TileSet(GPU_TILES, num_ctas=CTAS_PER_SM * sms)


def default_costs(device: torch.device | str, heads: HeadConfig, kv_bytes: int = 2) -> CostModel:
    """Cost constants by the device's name (plan/costs.py has the table)."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return CostModel.for_gpu(name, heads, kv_bytes)
