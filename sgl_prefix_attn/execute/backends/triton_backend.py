"""Launches of the Triton kernels; the only importer of sgl_prefix_attn.kernels.triton."""

from typing import Any, ClassVar

import torch
import triton

from sgl_prefix_attn.execute.backends.kernel_backend import Capabilities
from sgl_prefix_attn.execute.params import Capacity, LayerParams, Workspace
from sgl_prefix_attn.kernels import layout
from sgl_prefix_attn.kernels.triton.merge import merge_kernel
from sgl_prefix_attn.kernels.triton.segments import append_kernel, fill_segments_kernel
from sgl_prefix_attn.kernels.triton.shared import shared_kernel
from sgl_prefix_attn.kernels.triton.tails import tails_kernel
from sgl_prefix_attn.plan.tiles import TileConfig, TileSet
from sgl_prefix_attn.records import HeadConfig, StepPlan

_FILL_BLOCK = 1024
_MERGE_PARTS = 16
_MERGE_ELEMENTS = 1024  # of one program's output


def forward_constants(heads: HeadConfig, tile: TileConfig, i_tile: int) -> dict:
    """Return the constants that a tile's kernel is compiled with, flags of the call aside."""
    requests = {"REQUESTS": tile.requests} if tile.requests else {}
    return {
        "NUM_KV_HEADS": heads.num_kv_heads,
        "GROUP": heads.group_size,
        "HEAD_DIM": heads.head_dim,
        "BLOCK_D": _block_d(heads),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "TILE": i_tile,
        **requests,
    }


def compiler_options(tile: TileConfig) -> dict:
    """Say how Triton builds a tile's kernel."""
    cap = {"maxnreg": tile.max_regs} if tile.max_regs else {}
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **cap}


def _lse_or_out(layer: LayerParams) -> torch.Tensor:
    """Return an argument for the kernels where they do not write the LSE."""
    return layer.out if layer.out_lse is None else layer.out_lse


def _block_d(heads: HeadConfig) -> int:
    return max(16, triton.next_power_of_2(heads.head_dim))


class TritonBackend:
    """KernelBackend of NVIDIA GPUs (and of Triton's interpreter).

    One forward launch per tile, on parallel streams or in turn, then merge. All tiles that a plan
    of so many rows may use are launched every time, whether this plan uses them or not: a captured
    graph must serve any later plan. parallel_tiles=False is an ablation.
    """

    layout_version: ClassVar[int] = layout.VERSION
    capabilities: ClassVar[Capabilities] = Capabilities(
        head_dims=(16, 256),
        group_sizes=(1, 128),
        dtypes=frozenset((torch.float16, torch.bfloat16)),
    )

    def __init__(
        self,
        heads: HeadConfig,
        tile_set: TileSet,
        dtype: torch.dtype,
        device: torch.device,
        parallel_tiles: bool = True,
    ):
        self.heads = heads
        self.tile_set = tile_set
        self._dtype, self._device = dtype, device
        self.grids: dict[tuple[TileConfig, torch.dtype, bool], int] = {}
        on_gpu = device.type == "cuda"
        self.num_sms = (
            torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        )
        side = len(tile_set.tiles) - 1 if parallel_tiles and on_gpu else 0
        self.streams = [torch.cuda.Stream(device) for _ in range(side)]
        self.fork: Any = torch.cuda.Event() if side else None
        self.joins = [torch.cuda.Event() for _ in range(side)]

    def new_workspace(self, capacity: Capacity) -> Workspace:
        return Workspace.allocate(capacity, self.heads, self._dtype, self._device)

    def fill(
        self,
        workspace: Workspace,
        plan: StepPlan,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> None:
        blocks = min(64, triton.cdiv(plan.longest, _FILL_BLOCK))
        fill_segments_kernel[(int(plan.words[layout.H_NUM_SEGMENTS]), blocks)](
            workspace.words, req_to_token, req_pool_indices, workspace.kv_indices,
            req_to_token.stride(0), BLOCK=_FILL_BLOCK,
        )  # fmt: skip

    def append(
        self, workspace: Workspace, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor
    ) -> None:
        append_kernel[(1,)](
            workspace.words, seq_lens, out_cache_loc, workspace.kv_indices, BLOCK=1024
        )

    def forward(self, workspace: Workspace, layer: LayerParams) -> None:
        if self.streams:
            self.fork.record()
        usable = self.tile_set.usable(layer.out.shape[0], self.heads.num_kv_heads)
        joins = []
        # the largest tiles first: their items are the longest
        for i in reversed(usable):
            if self.streams and i > 0:
                side = self.streams[i - 1]
                side.wait_event(self.fork)
                with torch.cuda.stream(side):
                    self._forward(workspace, layer, i)
                joins.append(self.joins[i - 1])
                joins[-1].record(side)
            else:
                self._forward(workspace, layer, i)
        for join in joins:
            torch.cuda.current_stream().wait_event(join)
        self._merge(workspace, layer)

    def _forward(self, ws: Workspace, layer: LayerParams, i_tile: int) -> None:
        tile = self.tile_set.tiles[i_tile]
        kernel = tails_kernel if tile.requests else shared_kernel
        args = (
            layer.q, layer.k_cache, layer.v_cache, layer.out, _lse_or_out(layer), ws.partial_out,
            ws.partial_state, ws.words, ws.kv_indices, layer.seq_lens, ws.tickets[i_tile:],
            layer.q.stride(0), layer.k_cache.stride(0), layer.v_cache.stride(0),
            layer.out.stride(0), layer.sm_scale, layer.soft_cap,
        )  # fmt: skip
        options = {
            **forward_constants(self.heads, tile, i_tile),
            **compiler_options(tile),
            "HAS_SOFT_CAP": layer.soft_cap > 0,
            "HAS_LSE": layer.out_lse is not None,
        }
        key = (tile, layer.q.dtype, layer.soft_cap > 0)
        if key not in self.grids:
            self.grids[key] = self.num_sms * self._ctas_per_sm(kernel, args, options)
        kernel[(self.grids[key],)](*args, **options)

    def _ctas_per_sm(self, kernel, args, options) -> int:
        """CTAs of the compiled kernel that fit an SM, from its registers and shared memory."""
        if args[0].device.type != "cuda":
            return 4  # the interpreter runs them one after another
        compiled = kernel.warmup(*args, grid=(1,), **options)
        compiled._init_handles()
        device: Any = torch.cuda.get_device_properties(args[0].device)
        threads = 32 * options["num_warps"]
        by_registers = device.regs_per_multiprocessor // (max(compiled.n_regs, 1) * threads)
        shared = compiled.metadata.shared + 1024  # the driver reserves 1 KiB a CTA
        by_shared = device.shared_memory_per_multiprocessor // shared
        by_threads = device.max_threads_per_multi_processor // threads
        return max(1, min(by_registers, by_shared, by_threads))

    def _merge(self, ws: Workspace, layer: LayerParams) -> None:
        rows, heads, block_d = layer.out.shape[0], self.heads.num_qo_heads, _block_d(self.heads)
        # small batches: smaller programs, so that every SM has some
        elements = min(_MERGE_ELEMENTS, rows * heads * block_d // (2 * self.num_sms))
        block_h = max(1, elements // block_d)
        block_h = min(1 << (block_h.bit_length() - 1), triton.next_power_of_2(heads))
        merge_kernel[(rows, triton.cdiv(heads, block_h))](
            ws.partial_out, ws.partial_state, layer.out, _lse_or_out(layer), ws.words, ws.tickets,
            layer.out.stride(0), NUM_QO_HEADS=heads, HEAD_DIM=self.heads.head_dim,
            BLOCK_D=block_d, BLOCK_H=block_h, BLOCK_P=_MERGE_PARTS,
            HAS_LSE=layer.out_lse is not None, num_warps=4 if block_h * block_d >= 512 else 1,
        )  # fmt: skip
