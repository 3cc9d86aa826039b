"""The words of row tiles run in torch (row_tile_reference.py): what serves on a CPU."""

from __future__ import annotations

import torch

from sgl_prefix_attn.execute import row_tile_reference as reference
from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend, RowTileWorkspace
from sgl_prefix_attn.execute.params import LayerParams
from sgl_prefix_attn.records import HeadConfig, StepPlan

# Plans are made for a small GPU, so that few requests fill it and few blocks are split.
_SMS = 16


class TorchRowTiles(GluonBackend):
    """GluonBackend with its kernels replaced by their interpreter, for any head dim and dtype."""

    def __init__(
        self, heads: HeadConfig, dtype: torch.dtype, device: torch.device, pdl: bool = False
    ):
        super().__init__(heads, dtype, device, pdl)
        self.num_sms = _SMS

    def fill(
        self,
        workspace: RowTileWorkspace,
        plan: StepPlan,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> None:
        reference.fill(workspace.words, req_to_token, req_pool_indices, _blocks(workspace))

    def append(
        self, workspace: RowTileWorkspace, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor
    ) -> None:
        reference.append(workspace.words, seq_lens, out_cache_loc, _blocks(workspace))

    def forward(self, workspace: RowTileWorkspace, layer: LayerParams) -> None:
        out, lse = reference.execute(
            workspace.words, layer.q, layer.k_cache, layer.v_cache, _blocks(workspace),
            sm_scale=layer.sm_scale, logits_soft_cap=layer.soft_cap,
        )  # fmt: skip
        rows = reference.output_rows(workspace.words, self.heads.group_size)
        layer.out[rows] = out[rows].to(layer.out.dtype)
        if layer.out_lse is not None:
            layer.out_lse[rows] = lse[rows].to(layer.out_lse.dtype)


def _blocks(workspace: RowTileWorkspace) -> reference.Blocks:
    return reference.Blocks(workspace.kv_indices, workspace.keys)
