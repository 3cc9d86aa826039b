"""The two numbers before any measurement: the fewest bytes and the floating-point operations.

Over the rates of a GPU they give the reference time that the tables call floor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eval.bench_kernel.trees import Tree
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.calibrate.batches import Batch
from sgl_prefix_attn.tools.calibrate.timing import LayerTimer

# Rates that stock kernels themselves reach: FlashInfer and FA3 read 256_4096 at 3.0 TB/s. By the
# whole name that torch gives: an H100 PCIe or NVL has another memory.
_KNOWN = {"NVIDIA H100 80GB HBM3": (3.0e12, 600e12)}


@dataclass(frozen=True)
class Rates:
    """bandwidth [bytes/s] and flops [1/s] that the floor is computed with, and their source."""

    bandwidth: float
    flops: float
    source: str


def kv_bytes(tokens: int, heads: HeadConfig, itemsize: int = 2) -> int:
    """Count the bytes of K and V of so many tokens in one layer."""
    return tokens * heads.num_kv_heads * heads.token_dim * itemsize


def flops(requests: Tree | Batch, heads: HeadConfig) -> int:
    """Count the operations of QK and PV: every query head with every KV entry of its request."""
    return requests.tokens * heads.num_qo_heads * 2 * (heads.head_dim + heads.value_dim)


def floor_us(requests: Tree | Batch, heads: HeadConfig, rates: Rates, itemsize: int = 2) -> float:
    """Return the larger of the time for the bytes and for the operations, in microseconds.

    A reference, not a physical bound: its bandwidth is what good kernels reach in a paged gather,
    and a kernel that gathers a little better is a little faster.
    """
    read = kv_bytes(requests.unique_tokens, heads, itemsize)
    return 1e6 * max(read / rates.bandwidth, flops(requests, heads) / rates.flops)


def rates_of(device: torch.device) -> Rates:
    """Return known rates of this GPU, else measured ones."""
    if device.type != "cuda":
        return Rates(50e9, 1e12, "nominal CPU")
    name = torch.cuda.get_device_name(device)
    if name in _KNOWN:
        return Rates(*_KNOWN[name], f"table for {name}")
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy, multiply = (
        LayerTimer(work, 1, device, capture=False).us() * 1e-6
        for work in (lambda _: target.copy_(source), lambda _: a @ b)
    )
    copied, multiplied = 2 * source.nbytes / copy, 2 * 8192**3 / multiply
    return Rates(copied, multiplied, "measured copy and bf16 matrix product")
