"""Launches of the portable kernel."""

from __future__ import annotations

from typing import ClassVar

import torch

from sgl_prefix_attn.execute.backends.kernel_backend import NARROW_KV, Capabilities, KernelBackend
from sgl_prefix_attn.execute.params import LayerParams, Workspace
from sgl_prefix_attn.kernels.portable.portable_options import (
    PortableConfig,
    portable_config,
    portable_constants,
    portable_options,
)
from sgl_prefix_attn.kernels.portable.tile_attention import row_tile_portable_kernel
from sgl_prefix_attn.records import HeadConfig

_INTERPRETED_CTAS = 16


class PortableBackend(KernelBackend):
    """KernelBackend of NVIDIA GPUs from sm_80 on (and of Triton's interpreter): one launch a layer,
    whatever the tree.

    config: how the kernel is built, None: as is best for these heads; part_tokens as KernelBackend.
    """

    splits_nodes: ClassVar[bool] = True
    capabilities: ClassVar[Capabilities] = Capabilities(
        head_dims=(16, 256),
        group_sizes=(1, 128),
        dtypes=frozenset((torch.float16, torch.bfloat16)),
        kv_dtypes=frozenset((NARROW_KV,)),
    )

    def __init__(
        self,
        heads: HeadConfig,
        dtype: torch.dtype,
        device: torch.device,
        config: PortableConfig | None = None,
        part_tokens: int = 0,
    ):
        on_gpu = device.type == "cuda"
        self.config = config or self.config_for(heads)
        ctas = _INTERPRETED_CTAS
        if on_gpu:
            gpu = torch.cuda.get_device_properties(device)
            ctas = gpu.multi_processor_count * self.config.ctas
        super().__init__(heads, dtype, device, self.config.tile_rows, ctas, part_tokens)

    @staticmethod
    def config_for(heads: HeadConfig) -> PortableConfig:
        """Return how the kernel is built for these heads; ValueError where it is not."""
        return portable_config(heads.group_size, heads.head_dim)

    def forward(self, workspace: Workspace, layer: LayerParams) -> None:
        constants = portable_constants(
            self.heads.num_kv_heads, self.heads.group_size, self.heads.head_dim, self.config,
            has_cap=layer.soft_cap > 0, has_lse=layer.out_lse is not None,
            has_sink=layer.sinks is not None, invariant=bool(self.part_tokens),
        )  # fmt: skip
        row_tile_portable_kernel[(self.num_sms,)](
            *self._arguments(workspace, layer), **constants, **portable_options(self.config)
        )
