"""Which tiles a device gets."""

from dataclasses import replace

import torch

from sgl_prefix_attn.plan.tiles import TileConfig, TileSet
from sgl_prefix_attn.records import HeadConfig

CPU_SMS = 4


def default_tile_set(device: torch.device | str, heads: HeadConfig) -> TileSet:
    """Choose tiles for a device and heads: gpu_tile_set, or on a CPU a small set that
    exercises splits, row tiles and packed tails."""
    device = torch.device(device)
    if device.type == "cuda":
        return gpu_tile_set(torch.cuda.get_device_properties(device).multi_processor_count, heads)
    tail_m, requests = _tail_rows(heads)
    return TileSet(
        shared=tuple(TileConfig(rows, 32) for rows in sorted({max(m, tail_m) for m in (16, 64)})),
        tail=TileConfig(tail_m, 32, requests=1),
        packed_tail=TileConfig(tail_m, 32, requests=requests) if requests > 1 else None,
        packed_len=32,
        packed_tickets=1,
        num_sms=CPU_SMS,
    )


def gpu_tile_set(num_sms: int, heads: HeadConfig) -> TileSet:
    """Choose tiles for a GPU of num_sms multiprocessors, as measured on an H100 (kernel-log.md);
    needs no GPU."""
    tail_m, requests = _tail_rows(heads)
    rows = max(64, tail_m)
    # Many small CTAs, so few registers each. Wide heads need twice the warps to hold their
    # accumulators in registers. One shared tile: each further one costs every layer 2 to 3 us.
    wide = heads.head_dim > 128
    warps, stages = (2, 3) if wide else (1, 5)
    tail = TileConfig(tail_m, 64, 2 * warps, num_stages=3, requests=1, fill=2.4)
    return TileSet(
        shared=(TileConfig(rows, 32, 4 * warps, stages, max_regs=None if wide else 168),),
        tail=tail,
        packed_tail=replace(tail, num_stages=2, requests=requests) if requests > 1 else None,
        num_sms=num_sms,
    )


def _tail_rows(heads: HeadConfig) -> tuple[int, int]:
    """Return (rows of a tails tile, requests that fit into it side by side), powers of two."""
    tail_m = max(16, 1 << (heads.group_size - 1).bit_length())
    fitting = tail_m // heads.group_size
    return tail_m, 1 << (fitting.bit_length() - 1)
