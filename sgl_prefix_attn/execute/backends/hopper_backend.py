"""Launches of Hopper's kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sgl_prefix_attn.execute.backends.kernel_backend import (
    NARROW_KV,
    Capabilities,
    KernelBackend,
    kv_dtype_label,
    resident_ctas,
)
from sgl_prefix_attn.execute.params import LayerParams, Workspace
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.kernels.hopper.attention import row_tile_kernel
from sgl_prefix_attn.kernels.hopper.build_options import (
    CONFIGS,
    compiler_options,
    kernel_constants,
)
from sgl_prefix_attn.records import HeadConfig


@dataclass(frozen=True)
class HopperCapabilities(Capabilities):
    """Models that the kernel is built for: of the head dims within the bounds, not all are. Two
    terms of a query have the precision of bfloat16, and not that of float16."""

    def why_not(
        self, heads: HeadConfig, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if heads.head_dim not in CONFIGS:
            return f"head_dim:{heads.head_dim}"
        if kv_dtype == NARROW_KV and dtype != torch.bfloat16:
            return kv_dtype_label(kv_dtype)
        return super().why_not(heads, dtype, kv_dtype)


class HopperBackend(KernelBackend):
    """KernelBackend of Hopper GPUs: one launch a layer, whatever the tree.

    pdl: launches are programmatic dependent ones. The kernel starts while the one before it ends,
    reads words, slots and keys, and waits for that kernel before it reads or writes anything else.
    The first launch behind a fill or append waits until that has ended, and every later one starts
    after the first: all of them see what was written.

    part_tokens: as KernelBackend.
    """

    capabilities: ClassVar[Capabilities] = HopperCapabilities(
        head_dims=(min(CONFIGS), max(CONFIGS)),
        group_sizes=(1, 16),
        dtypes=frozenset((torch.float16, torch.bfloat16)),
        kv_dtypes=frozenset((NARROW_KV,)),
    )

    def __init__(
        self,
        heads: HeadConfig,
        dtype: torch.dtype,
        device: torch.device,
        pdl: bool = False,
        part_tokens: int = 0,
    ):
        super().__init__(heads, dtype, device, W.TILE_ROWS, resident_ctas(device), part_tokens)
        self.pdl = pdl

    def forward(self, workspace: Workspace, layer: LayerParams) -> None:
        launch_pdl, self._written = self.pdl and not self._written, False
        constants = kernel_constants(
            self.heads.num_kv_heads, self.heads.group_size, self.heads.head_dim,
            has_cap=layer.soft_cap > 0, has_lse=layer.out_lse is not None,
            has_sink=layer.sinks is not None, pdl=self.pdl,
            narrow=layer.k_cache.dtype == NARROW_KV, invariant=bool(self.part_tokens),
        )  # fmt: skip
        row_tile_kernel[(self.num_sms,)](
            *self._arguments(workspace, layer), **constants, **compiler_options(),
            launch_pdl=launch_pdl,
        )  # fmt: skip
