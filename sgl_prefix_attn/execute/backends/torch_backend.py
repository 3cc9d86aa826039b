"""The plan's words run in torch (interpreter.py): what serves on a CPU."""

from __future__ import annotations

from typing import ClassVar

import torch

from sgl_prefix_attn.execute import interpreter as reference
from sgl_prefix_attn.execute.backends.kernel_backend import (
    ANY_DIM,
    NARROW_KV,
    Capabilities,
    KernelBackend,
)
from sgl_prefix_attn.execute.params import LayerParams, Workspace
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.records import HeadConfig

# Plans are made for a small GPU, so that few requests fill it and few blocks are split.
_SMS = 16


class TorchBackend(KernelBackend):
    """KernelBackend of CPUs; branches on what tensors hold, so no graph can capture it.

    tile_rows: of the plans that it runs, None: the portable kernel's; part_tokens as KernelBackend
    """

    splits_nodes: ClassVar[bool] = True
    capabilities: ClassVar[Capabilities] = Capabilities(
        head_dims=(1, ANY_DIM),
        group_sizes=(1, 128),
        dtypes=frozenset((torch.float32, torch.float16, torch.bfloat16)),
        kv_dtypes=frozenset((NARROW_KV,)),
        latent=True,
    )

    def __init__(
        self, heads: HeadConfig, dtype: torch.dtype, device: torch.device,
        tile_rows: int | None = None, part_tokens: int = 0,
    ):  # fmt: skip
        rows = tile_rows or W.portable_tile_rows(heads.group_size)
        super().__init__(heads, dtype, device, rows, _SMS, part_tokens)

    def fill(
        self,
        workspace: Workspace,
        plan: Plan,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> None:
        reference.fill(workspace.words, req_to_token, req_pool_indices, _blocks(workspace))

    def append(
        self, workspace: Workspace, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor
    ) -> None:
        reference.append(workspace.words, seq_lens, out_cache_loc, _blocks(workspace))

    def forward(self, workspace: Workspace, layer: LayerParams) -> None:
        q = layer.q if layer.q_rope is None else torch.cat([layer.q, layer.q_rope], -1)
        out, lse = reference.execute(
            workspace.words, q, layer.k_cache, layer.v_cache, _blocks(workspace),
            sm_scale=layer.sm_scale * layer.k_scale, logits_soft_cap=layer.soft_cap,
            sinks=layer.sinks, v_scale=layer.v_scale,
        )  # fmt: skip
        rows = reference.output_rows(workspace.words, self.heads.group_size)
        layer.out[rows] = out[rows].to(layer.out.dtype)
        if layer.out_lse is not None:
            layer.out_lse[rows] = lse[rows].to(layer.out_lse.dtype)


def _blocks(workspace: Workspace) -> reference.Blocks:
    return reference.Blocks(workspace.kv_indices, workspace.keys)
