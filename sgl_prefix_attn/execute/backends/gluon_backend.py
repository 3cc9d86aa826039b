"""Launches of the row-tile kernel and of what fills its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton

from sgl_prefix_attn.execute.backends.kernel_backend import Capabilities
from sgl_prefix_attn.execute.params import Capacity, LayerParams, Workspace
from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.kernels.gluon.attention import row_tile_kernel
from sgl_prefix_attn.kernels.gluon.build_options import (
    CONFIGS,
    compiler_options,
    kernel_constants,
)
from sgl_prefix_attn.kernels.gluon.slots import append_token_kernel, fill_blocks_kernel
from sgl_prefix_attn.records import HeadConfig, StepPlan

_FILL_STEP = 1024
# How often tiles of one plan may read each KV slot of a server, and how many reads (8 bytes each)
# there is room for in any case: few slots may be shared by many tiles.
_READS, _LEAST_READS = 8, 1 << 23


@dataclass(frozen=True)
class RowTileCapabilities(Capabilities):
    """Models that the kernel is built for: of the head dims within the bounds, not all are."""

    def why_not(self, heads: HeadConfig, dtype: torch.dtype) -> str | None:
        if heads.head_dim not in CONFIGS:
            return f"head_dim:{heads.head_dim}"
        return super().why_not(heads, dtype)


@dataclass(frozen=True)
class RowTileWorkspace(Workspace):
    """Device memory of a row-tile plan.

    kv_indices     int32 [blocks * BLOCK]  slots of every block
    keys           int32 [blocks * BLOCK]  for which queries each column is
    partial_out    float16 [partials, Hq, D], used as [partial tiles, Hkv, TILE_ROWS, D]
    partial_state  float32 [partials, Hq, 2], used as [partial tiles, Hkv, TILE_ROWS, 2]
    tickets        int32 [counters * Hkv * 2]  parts that are done, 0 between forwards
    """

    keys: torch.Tensor


class GluonBackend:
    """KernelBackend of Hopper GPUs: one launch a layer, whatever the tree.

    pdl: launches are programmatic dependent ones. The kernel starts while the one before it ends,
    reads words, slots and keys, and waits for that kernel before it reads or writes anything else.
    The first launch behind a fill or append is in full order: what these wrote is there for every
    later launch, because each starts after that one did.
    """

    layout_version: ClassVar[int] = W.VERSION
    fused_merge: ClassVar[bool] = True
    dynamic: bool = False
    capabilities: ClassVar[Capabilities] = RowTileCapabilities(
        head_dims=(min(CONFIGS), max(CONFIGS)),
        group_sizes=(1, 16),
        dtypes=frozenset((torch.float16, torch.bfloat16)),
    )

    def __init__(
        self,
        heads: HeadConfig,
        dtype: torch.dtype,
        device: torch.device,
        pdl: bool = False,
    ):
        self.heads, self.pdl = heads, pdl
        self._written = True  # by a fill or append, since the last launch
        self._dtype, self._device = dtype, device
        gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        # more CTAs than SMs would wait for parts of CTAs that cannot start
        self.num_sms = gpu.multi_processor_count if gpu else 1

    def server_capacity(self, max_batch: int, max_tokens: int, headroom: int) -> Capacity:
        """Return enough for max_batch requests over max_tokens KV slots.

        In the widest tiles every slot, as often as there are tiles that may read it, up to _READS
        times or _LEAST_READS in all: the planner takes wider tiles before a step goes to stock
        kernels. Headroom and unfilled blocks for every request, and six runs of KV per request on
        average.
        """
        # the planner's split tiles have at most about as many parts as there are SMs for a head
        parts = 2 * (self.num_sms // self.heads.num_kv_heads + 1)
        items = max_batch + parts
        tiles = triton.cdiv(max_batch, W.queries_per_tile(self.heads.group_size))
        reads = min(tiles * max_tokens, max(_READS * max_tokens, _LEAST_READS))
        # besides whole blocks a tile has one that is masked, one of growth and its first blocks
        blocks = triton.cdiv(reads + headroom * max_batch, W.BLOCK)
        blocks += (2 + W.PRE) * items + W.PRE
        segments = 2 * (6 * max_batch) + 2 * items
        return Capacity(
            words=W.HEADER_WORDS
            + items * (W.item_words(self.heads.group_size) + 2)
            + 2 * blocks
            + max_batch * W.GROWTH_WORDS
            + segments * W.SEGMENT_WORDS,
            index_slots=blocks * W.BLOCK,
            partials=triton.cdiv(parts * W.TILE_ROWS, self.heads.group_size),
        )

    def new_workspace(self, capacity: Capacity) -> RowTileWorkspace:
        # every CTA asks for its first blocks' slots before it knows whether it has an item, one
        # without reads the first item's words, and flags are read two words behind an item's last
        first_blocks = W.PRE * (self.num_sms // self.heads.num_kv_heads + 2) * W.BLOCK
        first_words = W.HEADER_WORDS + W.item_words(self.heads.group_size)
        sized = Capacity(
            max(capacity.words, first_words) + 2,
            max(capacity.index_slots, first_blocks),
            max(capacity.partials, 1),
        )
        shared = Workspace.allocate(sized, self.heads, self._dtype, self._device)
        shared.words[W.H_VERSION] = W.VERSION
        # a split tile has at least two partial tiles
        split_tiles = sized.partials * self.heads.group_size // (2 * W.TILE_ROWS) + 1
        counters = split_tiles * self.heads.num_kv_heads * 2
        return RowTileWorkspace(
            words=shared.words,
            kv_indices=shared.kv_indices,
            keys=torch.zeros_like(shared.kv_indices),
            partial_out=shared.partial_out,
            partial_state=shared.partial_state,
            tickets=torch.zeros(counters, dtype=torch.int32, device=self._device),
        )

    def fill(
        self,
        workspace: RowTileWorkspace,
        plan: StepPlan,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> None:
        self._written = True
        segments = int(plan.words[W.H_NUM_SEGMENTS])
        if segments:
            fill_blocks_kernel[(segments, min(64, triton.cdiv(plan.longest, _FILL_STEP)))](
                workspace.words, req_to_token, req_pool_indices, workspace.kv_indices,
                workspace.keys, req_to_token.stride(0), STEP=_FILL_STEP,
            )  # fmt: skip

    def append(
        self, workspace: RowTileWorkspace, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor
    ) -> None:
        self._written = True
        append_token_kernel[(1,)](
            workspace.words, seq_lens, out_cache_loc, workspace.kv_indices, workspace.keys,
            STEP=1024,
        )  # fmt: skip

    def forward(self, workspace: RowTileWorkspace, layer: LayerParams) -> None:
        launch_pdl, self._written = self.pdl and not self._written, False
        constants = kernel_constants(
            self.heads.num_kv_heads, self.heads.group_size, self.heads.head_dim,
            has_cap=layer.soft_cap > 0, has_lse=layer.out_lse is not None, pdl=self.pdl,
            fused_merge=self.fused_merge, dynamic=self.dynamic,
        )  # fmt: skip
        row_tile_kernel[(self.num_sms,)](
            layer.q, layer.k_cache, layer.v_cache, layer.out,
            workspace.partial_state if layer.out_lse is None else layer.out_lse,
            workspace.partial_out, workspace.partial_state, workspace.tickets, workspace.words,
            workspace.kv_indices, workspace.keys, layer.q.stride(0), layer.k_cache.stride(0),
            layer.v_cache.stride(0), layer.out.stride(0), layer.sm_scale, layer.soft_cap,
            **constants, **compiler_options(), launch_pdl=launch_pdl,
        )  # fmt: skip
