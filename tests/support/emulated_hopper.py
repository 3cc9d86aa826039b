"""HopperBackend whose attention kernel is emulated."""

from __future__ import annotations

import torch

from sgl_prefix_attn.kernels.hopper.attention import row_tile_kernel
from sgl_prefix_attn.kernels.hopper.build_options import kernel_constants
from tests.support.emulated_gluon import launch
from tests.support.torch_hopper import TorchHopper


class EmulatedHopper(TorchHopper):
    """Slots and keys are written in torch, attention is the kernel's own source."""

    faults: tuple = ()

    def forward(self, workspace, layer) -> None:
        constants = kernel_constants(
            self.heads.num_kv_heads, self.heads.group_size, self.heads.head_dim,
            has_cap=layer.soft_cap > 0, has_lse=layer.out_lse is not None,
            has_sink=layer.sinks is not None, pdl=False,
            narrow=layer.k_cache.dtype == torch.float8_e4m3fn, invariant=bool(self.part_tokens),
        )  # fmt: skip
        arguments = self._arguments(workspace, layer)
        tensors, scalars = arguments[:-7], arguments[-7:]  # four strides, scale, cap, V's scale
        launch(row_tile_kernel, self.num_sms, tensors, scalars, constants, self.faults)
