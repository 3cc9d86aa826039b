"""What a pack costs, in microseconds of the whole GPU: the numbers behind strategy `calibrated`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sgl_prefix_attn.records import HeadConfig


@dataclass(frozen=True)
class GpuRates:
    """What a whole GPU sustains.

    bandwidth  bytes/us of a paged gather
    mma        flop/us of the shared kernel's two products
    item       us that a CTA needs for a work item besides its KV
    ctas       CTAs over which items spread
    launch     us that a step costs however little there is to do
    """

    bandwidth: float
    mma: float
    item: float
    ctas: int
    launch: float

    def __post_init__(self):
        for name in ("bandwidth", "mma", "item", "ctas", "launch"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and > 0, got {value!r}")


# H100 and H200 as `sgl-prefix-attn calibrate` measured them for 32/8 heads of 128; the other rows
# are estimates.
GPU_RATES = {
    "H100": GpuRates(bandwidth=2.94e6, mma=338e6, item=6.0, ctas=396, launch=3.1),
    "H200": GpuRates(bandwidth=4.24e6, mma=343e6, item=6.5, ctas=396, launch=2.9),
    "A100": GpuRates(bandwidth=1.7e6, mma=150e6, item=6.0, ctas=324, launch=6.0),
    "other": GpuRates(bandwidth=1.0e6, mma=100e6, item=6.0, ctas=200, launch=6.0),
}


def known_rates(gpu_name: str) -> GpuRates | None:
    """Return the first row of the table whose name occurs in gpu_name."""
    return next((rates for name, rates in GPU_RATES.items() if name in gpu_name), None)


def usual_rates(gpu_name: str) -> GpuRates:
    """Return known_rates, or the row of an unknown GPU."""
    return known_rates(gpu_name) or GPU_RATES["other"]


# Bytes of KV that a CTA streams in a microsecond while it has the memory to itself.
_CHAIN_BANDWIDTH = 35e3


@dataclass(frozen=True)
class CostModel:
    """Costs per unit of work, for one layer and all its KV heads.

    kv_token   us to read one KV token from device memory
    mma_row    us of tensor-core time for one KV token times one row of a KV head's tile, times
               the number of KV heads; rows are queries * group_size rounded up to row_step
    partial    us to write and read back one query's partial result for all query heads
    item       us that one CTA needs for a work item besides its KV
    pack       the same, for all items of a pack, in us of the whole GPU
    launch     us that launching and merging a step cost, however little there is to do
    chain      us that one CTA needs for one KV token of one head while the memory is idle
    row_step   granularity of a tile's rows
    """

    kv_token: float
    mma_row: float
    partial: float
    item: float
    pack: float
    launch: float
    chain: float
    group_size: int
    num_kv_heads: int
    row_step: int = 16

    @classmethod
    def for_gpu(cls, gpu_name: str, heads: HeadConfig, kv_bytes: int = 2) -> CostModel:
        return cls.from_rates(usual_rates(gpu_name), heads, kv_bytes)

    @classmethod
    def from_rates(cls, rates: GpuRates, heads: HeadConfig, kv_bytes: int = 2) -> CostModel:
        d, hkv = heads.head_dim, heads.num_kv_heads
        return cls(
            kv_token=2 * hkv * d * kv_bytes / rates.bandwidth,
            mma_row=4 * hkv * d / rates.mma,
            partial=partial_bytes(heads, kv_bytes) / rates.bandwidth,
            item=rates.item,
            pack=rates.item * hkv / rates.ctas,
            launch=rates.launch,
            chain=2 * d * kv_bytes / _CHAIN_BANDWIDTH,
            group_size=heads.group_size,
            num_kv_heads=hkv,
        )


def partial_bytes(heads: HeadConfig, kv_bytes: int) -> int:
    """Count the bytes one query's partial result moves, written and read: the output in the model's
    width, LSE and scale in float32."""
    return 2 * heads.num_qo_heads * (heads.head_dim * kv_bytes + 8)
