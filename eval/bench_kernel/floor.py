"""The two numbers before any measurement: the fewest bytes and the floating-point operations.

Over the rates of a GPU they give the reference time that the tables call floor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from eval.bench_kernel.trees import Tree
from sgl_prefix_attn.records import HeadConfig

# Rates that stock kernels themselves reach: FlashInfer and FA3 read 256_4096 at 3.0 TB/s. By the
# whole name that torch gives: an H100 PCIe or NVL has another memory.
_KNOWN = {"NVIDIA H100 80GB HBM3": (3.0e12, 600e12)}


@dataclass(frozen=True)
class Rates:
    """bandwidth [bytes/s] and flops [1/s] that the floor is computed with, and their source."""

    bandwidth: float
    flops: float
    source: str


def kv_bytes(tree: Tree, heads: HeadConfig, itemsize: int) -> int:
    """Count the bytes of the tree's K and V, each entry once (queries and outputs are left out)."""
    return tree.num_tokens * heads.num_kv_heads * heads.head_dim * 2 * itemsize


def flops(tree: Tree, heads: HeadConfig) -> int:
    """Count the operations of QK and PV: every query head with every KV entry of its request."""
    return tree.batch_size * tree.seq_len * heads.num_qo_heads * heads.head_dim * 4


def floor_us(tree: Tree, heads: HeadConfig, itemsize: int, rates: Rates) -> float:
    """Return the larger of the time for the bytes and for the operations, in microseconds.

    A reference, not a physical bound: its bandwidth is what good kernels reach in a paged gather,
    and a kernel that gathers a little better is a little faster.
    """
    seconds = max(
        kv_bytes(tree, heads, itemsize) / rates.bandwidth, flops(tree, heads) / rates.flops
    )
    return seconds * 1e6


def rates_of(device: torch.device) -> Rates:
    """Return known rates of this GPU, else measured ones."""
    if device.type != "cuda":
        return Rates(50e9, 1e12, "nominal CPU")
    name = torch.cuda.get_device_name(device)
    if name in _KNOWN:
        return Rates(*_KNOWN[name], f"table for {name}")
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _median_seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    multiplied = 2 * 8192**3 / _median_seconds(lambda: a @ b)
    return Rates(copied, multiplied, "measured copy and bf16 matrix product")


def _median_seconds(work: Callable[[], object], repeats: int = 11) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
