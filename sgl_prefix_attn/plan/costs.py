"""What a stretch of KV that some queries read together costs: the numbers behind the per-node
optimum (profit.py, dynamic.py)."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.kernel_rates import KernelRates
from sgl_prefix_attn.records import HeadConfig


@dataclass(frozen=True)
class CostModel:
    """Costs per unit of work, in microseconds of the whole GPU, for one layer and all its KV heads.

    kv_token   to read one KV token from device memory
    mma_row    of tensor cores for one KV token times one row of a KV head's tile, times the number
               of KV heads; rows are queries * group_size rounded up to row_step
    partial    to write and read back one query's partial result for all query heads
    item       that a pack takes as an item of its own besides its KV, for all KV heads
    """

    kv_token: float
    mma_row: float
    partial: float
    item: float
    group_size: int
    row_step: int = 16

    @classmethod
    def of(cls, rates: KernelRates, heads: HeadConfig, num_sms: int, tile_rows: int) -> CostModel:
        """Take costs from the rates of a kernel that has num_sms CTAs at once and such tiles."""
        hkv, products = heads.num_kv_heads, (heads.head_dim + heads.value_dim) / 256
        row_us = rates.wide * products / (W.BLOCK * tile_rows)
        return cls(
            kv_token=2 * hkv * heads.token_dim / rates.hbm,
            mma_row=row_us * hkv / num_sms,
            partial=heads.num_qo_heads * (2 * heads.value_dim + 8) / rates.partial,
            item=rates.item * hkv / num_sms,
            group_size=heads.group_size,
        )
