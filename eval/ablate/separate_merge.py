"""Row tiles whose partial results another kernel merges: two launches a layer."""

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl

from eval.ablate.strategies import Merges
from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend, RowTileWorkspace
from sgl_prefix_attn.execute.params import LayerParams
from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.records import HeadConfig


@triton.jit
def merge_kernel(
    out_ptr,  # [rows, Hq, D]
    partial_out_ptr,  # float16 [partials, Hkv, TILE_ROWS, D]
    partial_state_ptr,  # float32 [partials, Hkv, TILE_ROWS, 2]: LSE in base 2, scale of the row
    offset_ptr,  # int32 [B+1]
    tile_ptr,  # int32 [parts]
    query_ptr,  # int32 [parts]
    tickets_ptr,  # int32 [1], made 0: what dynamic queues count
    stride_out,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Grid (B, Hkv): the parts of a request one after the other, so that results repeat."""
    request, head = tl.program_id(0), tl.program_id(1)
    if request + head == 0:
        tl.store(tickets_ptr, 0)
    first = tl.load(offset_ptr + request)
    end = tl.load(offset_ptr + request + 1)
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, HEAD_DIM)
    mask = offs_g < GROUP
    row_max = tl.full([BLOCK_G], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
    for part in range(first, end):
        tile = tl.load(tile_ptr + part).to(tl.int64)
        row = (tile * HEADS + head) * TILE_ROWS + tl.load(query_ptr + part) * GROUP + offs_g
        b_lse = tl.load(partial_state_ptr + row * 2, mask=mask, other=0.0)
        b_scale = tl.load(partial_state_ptr + row * 2 + 1, mask=mask, other=0.0)
        p_out = partial_out_ptr + row[:, None] * HEAD_DIM + offs_d[None, :]
        b_out = tl.load(p_out, mask=mask[:, None], other=0.0).to(tl.float32)
        new_max = tl.maximum(row_max, b_lse)
        old, weight = tl.exp2(row_max - new_max), tl.exp2(b_lse - new_max)
        total = total * old + weight
        acc = acc * old[:, None] + b_out * (weight * b_scale)[:, None]
        row_max = new_max
    if end > first:
        i_head = head * GROUP + offs_g
        p_out = out_ptr + request.to(tl.int64) * stride_out + i_head[:, None] * HEAD_DIM
        result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(p_out + offs_d[None, :], result, mask=mask[:, None])


class SeparateMerge(GluonBackend):
    """GluonBackend for one plan of strategies.serialize_parts, without LSE output; with dynamic,
    CTAs take tickets as they become free."""

    fused_merge: ClassVar[bool] = False

    def __init__(
        self,
        heads: HeadConfig,
        dtype: torch.dtype,
        device: torch.device,
        merges: Merges,
        dynamic: bool = False,
    ):
        super().__init__(heads, dtype, device)
        self.dynamic = dynamic
        self.batch = merges.offset.size - 1
        self.merges = [
            torch.from_numpy(array).to(device)
            for array in (merges.offset, merges.tile, merges.query)
        ]

    def forward(self, workspace: RowTileWorkspace, layer: LayerParams) -> None:
        super().forward(workspace, layer)
        self.merge(workspace, layer)

    def merge(self, workspace: RowTileWorkspace, layer: LayerParams) -> None:
        merge_kernel[(self.batch, self.heads.num_kv_heads)](
            layer.out, workspace.partial_out, workspace.partial_state, *self.merges,
            workspace.tickets, layer.out.stride(0),
            HEADS=self.heads.num_kv_heads, GROUP=self.heads.group_size,
            HEAD_DIM=self.heads.head_dim, TILE_ROWS=W.TILE_ROWS,
            BLOCK_G=triton.next_power_of_2(self.heads.group_size), num_warps=1,
        )  # fmt: skip
