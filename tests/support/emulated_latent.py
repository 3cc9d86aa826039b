"""LatentBackend whose attention kernel is emulated."""

from __future__ import annotations

import torch

from sgl_prefix_attn.execute.backends.latent_backend import latent_scalars, latent_tensors
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.kernels.latent.latent_attention import latent_tile_kernel
from sgl_prefix_attn.kernels.latent.latent_options import latent_constants
from tests.support.emulated_gluon import launch


class EmulatedLatent(TorchBackend):
    """Slots and keys are written in torch, attention is the kernel's own source."""

    splits_nodes = False
    faults: tuple = ()

    def __init__(self, heads, dtype, device):
        super().__init__(heads, dtype, device, W.HALF_ROWS)

    def forward(self, workspace, layer) -> None:
        constants = latent_constants(self.heads.num_qo_heads, has_lse=layer.out_lse is not None)
        tensors = [_from_here_on(x) for x in latent_tensors(workspace, layer)]
        scalars = latent_scalars(layer)
        launch(latent_tile_kernel, self.num_sms, tensors, scalars, constants, self.faults)


def _from_here_on(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory behind a pointer to the tensor."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return tensor.as_strided((size,), (1,))
