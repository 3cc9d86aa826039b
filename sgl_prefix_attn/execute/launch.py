"""Launches of the Triton kernels; the only importer of sgl_prefix_attn.kernels.triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from sgl_prefix_attn.kernels import layout
from sgl_prefix_attn.kernels.triton.merge import merge_kernel
from sgl_prefix_attn.kernels.triton.segments import append_kernel, fill_segments_kernel
from sgl_prefix_attn.kernels.triton.shared import shared_kernel
from sgl_prefix_attn.kernels.triton.tails import tails_kernel
from sgl_prefix_attn.plan.tiles import TileConfig, TileSet
from sgl_prefix_attn.records import HeadConfig

_FILL_BLOCK = 1024
_MERGE_PARTS = 16
_MERGE_ELEMENTS = 1024  # of one program's output


@dataclass(frozen=True)
class Workspace:
    """Device memory that the kernels share; its addresses never change, so that graphs may hold it.

    words          int32 [words]               the plan
    kv_indices     int32 [entries]             slots of every segment
    partial_out    [partials, Hq, D]           float16 for half-precision models, else float32
    partial_state  float32 [partials, Hq, 2]   LSE in base 2, scale of the row
    tickets        int32 [MAX_TILES]           0 between forwards
    """

    words: torch.Tensor
    kv_indices: torch.Tensor
    partial_out: torch.Tensor
    partial_state: torch.Tensor
    tickets: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """One layer's tensors: q, out [>= B, Hq, D]; caches [slots, Hkv, D]; seq_lens int [>= B];
    out_lse float32 [>= B, Hq] in base 2, or None; soft_cap 0 means none."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    out_lse: torch.Tensor | None
    sm_scale: float
    soft_cap: float

    @property
    def lse_or_out(self) -> torch.Tensor:
        """An argument for the kernels where they do not write the LSE."""
        return self.out if self.out_lse is None else self.out_lse


def forward_constants(heads: HeadConfig, tile: TileConfig, i_tile: int) -> dict:
    """The constants that a tile's kernel is compiled with, flags of the call aside."""
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
    """How Triton builds a tile's kernel."""
    cap = {"maxnreg": tile.max_regs} if tile.max_regs else {}
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **cap}


def _block_d(heads: HeadConfig) -> int:
    return max(16, triton.next_power_of_2(heads.head_dim))


def fill_segments(ws: Workspace, req_to_token, req_pool_indices, num_segments: int, longest: int):
    """Copy the slots of every segment from req_to_token [R, C] into ws.kv_indices."""
    blocks = min(64, triton.cdiv(longest, _FILL_BLOCK))
    fill_segments_kernel[(num_segments, blocks)](
        ws.words, req_to_token, req_pool_indices, ws.kv_indices, req_to_token.stride(0),
        BLOCK=_FILL_BLOCK,
    )  # fmt: skip


def append(ws: Workspace, seq_lens, out_cache_loc):
    """Write each request's newest slot (out_cache_loc [>= B]) at the end of its tail."""
    append_kernel[(1,)](ws.words, seq_lens, out_cache_loc, ws.kv_indices, BLOCK=1024)


class ForwardLauncher:
    """Runs a loaded plan: one forward launch a tile, on parallel streams or in turn, then merge.

    All tiles that a plan of so many rows may use are launched every time, whether this plan uses
    them or not: a captured graph must serve any later plan.
    """

    def __init__(self, heads: HeadConfig, tile_set: TileSet, device: torch.device, parallel: bool):
        self.heads = heads
        self.tile_set = tile_set
        self.grids: dict[tuple[TileConfig, torch.dtype, bool], int] = {}
        on_gpu = device.type == "cuda"
        self.num_sms = (
            torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        )
        side = len(tile_set.tiles) - 1 if parallel and on_gpu else 0
        self.streams = [torch.cuda.Stream(device) for _ in range(side)]
        self.fork = torch.cuda.Event() if side else None
        self.joins = [torch.cuda.Event() for _ in range(side)]

    def __call__(self, ws: Workspace, layer: Layer) -> None:
        main = torch.cuda.current_stream() if self.streams else None
        if self.streams:
            self.fork.record(main)
        usable = self.tile_set.usable(layer.out.shape[0], self.heads.num_kv_heads)
        joins = []
        # the largest tiles first: their items are the longest
        for i in reversed(usable):
            if self.streams and i > 0:
                side = self.streams[i - 1]
                side.wait_event(self.fork)
                with torch.cuda.stream(side):
                    self._forward(ws, layer, i)
                joins.append(self.joins[i - 1])
                joins[-1].record(side)
            else:
                self._forward(ws, layer, i)
        for join in joins:
            main.wait_event(join)
        self._merge(ws, layer)

    def _forward(self, ws: Workspace, layer: Layer, i_tile: int) -> None:
        tile = self.tile_set.tiles[i_tile]
        kernel = tails_kernel if tile.requests else shared_kernel
        args = (
            layer.q, layer.k_cache, layer.v_cache, layer.out, layer.lse_or_out, ws.partial_out,
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
        device = torch.cuda.get_device_properties(args[0].device)
        threads = 32 * options["num_warps"]
        by_registers = device.regs_per_multiprocessor // (max(compiled.n_regs, 1) * threads)
        shared = compiled.metadata.shared + 1024  # the driver reserves 1 KiB a CTA
        by_shared = device.shared_memory_per_multiprocessor // shared
        by_threads = device.max_threads_per_multi_processor // threads
        return max(1, min(by_registers, by_shared, by_threads))

    def _merge(self, ws: Workspace, layer: Layer) -> None:
        rows, heads, block_d = layer.out.shape[0], self.heads.num_qo_heads, _block_d(self.heads)
        # small batches: smaller programs, so that every SM has some
        elements = min(_MERGE_ELEMENTS, rows * heads * block_d // (2 * self.num_sms))
        block_h = max(1, elements // block_d)
        block_h = min(1 << (block_h.bit_length() - 1), triton.next_power_of_2(heads))
        merge_kernel[(rows, triton.cdiv(heads, block_h))](
            ws.partial_out, ws.partial_state, layer.out, layer.lse_or_out, ws.words, ws.tickets,
            layer.out.stride(0), NUM_QO_HEADS=heads, HEAD_DIM=self.heads.head_dim,
            BLOCK_D=block_d, BLOCK_H=block_h, BLOCK_P=_MERGE_PARTS,
            HAS_LSE=layer.out_lse is not None, num_warps=4 if block_h * block_d >= 512 else 1,
        )  # fmt: skip


def new_workspace(
    words: int,
    index_slots: int,
    partials: int,
    heads: HeadConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> Workspace:
    """Allocate a workspace; an empty plan (no requests, no items) is loaded in it."""
    shape = (partials, heads.num_qo_heads)
    partial_dtype = torch.float32 if dtype == torch.float32 else torch.float16
    return Workspace(
        words=torch.zeros(words, dtype=torch.int32, device=device),
        kv_indices=torch.zeros(index_slots, dtype=torch.int32, device=device),
        partial_out=torch.empty(*shape, heads.head_dim, dtype=partial_dtype, device=device),
        partial_state=torch.empty(*shape, 2, dtype=torch.float32, device=device),
        tickets=torch.zeros(layout.MAX_TILES, dtype=torch.int32, device=device),
    )
