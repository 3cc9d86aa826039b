"""The plan's words run in torch (reference.py): what serves on a CPU."""

from typing import ClassVar

import torch

from sgl_prefix_attn.execute import reference
from sgl_prefix_attn.execute.backends.kernel_backend import Capabilities
from sgl_prefix_attn.execute.params import Capacity, LayerParams, Workspace
from sgl_prefix_attn.kernels import layout
from sgl_prefix_attn.records import HeadConfig, StepPlan


class TorchBackend:
    """KernelBackend of CPUs; branches on what tensors hold, so no graph can capture it."""

    layout_version: ClassVar[int] = layout.VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(
        head_dims=(1, 1 << 16),
        group_sizes=(1, 128),
        dtypes=frozenset((torch.float32, torch.float16, torch.bfloat16)),
    )

    def __init__(self, heads: HeadConfig, dtype: torch.dtype, device: torch.device):
        self._heads, self._dtype, self._device = heads, dtype, device

    def new_workspace(self, capacity: Capacity) -> Workspace:
        # The interpreter keeps partial results to itself.
        without = Capacity(capacity.words, capacity.index_slots, partials=0)
        return Workspace.allocate(without, self._heads, self._dtype, self._device)

    def fill(
        self,
        workspace: Workspace,
        plan: StepPlan,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> None:
        words, kv_indices = workspace.words, workspace.kv_indices
        reference.fill_segments(words, req_to_token, req_pool_indices, kv_indices)

    def append(
        self, workspace: Workspace, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor
    ) -> None:
        reference.append(workspace.words, seq_lens, out_cache_loc, workspace.kv_indices)

    def forward(self, workspace: Workspace, layer: LayerParams) -> None:
        out, lse = reference.execute(
            workspace.words, layer.q, layer.k_cache, layer.v_cache, workspace.kv_indices,
            layer.seq_lens, sm_scale=layer.sm_scale, logits_soft_cap=layer.soft_cap,
        )  # fmt: skip
        layer.out[: len(out)] = out
        if layer.out_lse is not None:
            layer.out_lse[: len(out)] = lse.values
