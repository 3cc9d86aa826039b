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

    All tiles of the set are launched every time, whether this plan uses them or not: a captured
    graph must serve any later plan.
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

    def __call__(
        self, ws: Workspace, q, k_cache, v_cache, seq_lens, out, out_lse, sm_scale, soft_cap
    ):
        main = torch.cuda.current_stream() if self.streams else None
        if self.streams:
            self.fork.record(main)
        for i in reversed(range(len(self.tile_set.tiles))):
            args = (ws, i, q, k_cache, v_cache, seq_lens, out, out_lse, sm_scale, soft_cap)
            if self.streams and i > 0:
                side = self.streams[i - 1]
                side.wait_event(self.fork)
                with torch.cuda.stream(side):
                    self._forward(*args)
                self.joins[i - 1].record(side)
            else:
                self._forward(*args)
        for join in self.joins:
            main.wait_event(join)
        self._merge(ws, out, out_lse)

    def _forward(
        self, ws: Workspace, i_tile, q, k_cache, v_cache, seq_lens, out, out_lse, sm_scale, soft_cap
    ):
        tile, heads = self.tile_set.tiles[i_tile], self.heads
        args = (
            q, k_cache, v_cache, out, out if out_lse is None else out_lse, ws.partial_out,
            ws.partial_state, ws.words, ws.kv_indices, seq_lens, ws.tickets[i_tile:], 
            q.stride(0), k_cache.stride(0), v_cache.stride(0), out.stride(0), sm_scale, soft_cap,
        )  # fmt: skip
        options = {
            "NUM_KV_HEADS": heads.num_kv_heads,
            "GROUP": heads.group_size,
            "HEAD_DIM": heads.head_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(heads.head_dim)),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "TILE": i_tile,
            "HAS_SOFT_CAP": soft_cap > 0,
            "HAS_LSE": out_lse is not None,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        if tile.max_regs:
            options["maxnreg"] = tile.max_regs
        kernel = shared_kernel
        if tile.requests:
            kernel = tails_kernel
            options["REQUESTS"] = tile.requests
        key = (tile, q.dtype, soft_cap > 0)
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

    def _merge(self, ws: Workspace, out, out_lse):
        heads = self.heads
        block_d = max(16, triton.next_power_of_2(heads.head_dim))
        # small batches: smaller programs, so that every SM has some
        elements = out.shape[0] * heads.num_qo_heads * block_d // (2 * self.num_sms)
        block_h = max(1, min(_MERGE_ELEMENTS, elements) // block_d)
        block_h = min(1 << (block_h.bit_length() - 1), triton.next_power_of_2(heads.num_qo_heads))
        merge_kernel[(out.shape[0], triton.cdiv(heads.num_qo_heads, block_h))](
            ws.partial_out, ws.partial_state, out, out if out_lse is None else out_lse, ws.words,
            ws.tickets, out.stride(0),
            NUM_QO_HEADS=heads.num_qo_heads, HEAD_DIM=heads.head_dim,
            BLOCK_D=block_d, BLOCK_H=block_h, BLOCK_P=_MERGE_PARTS,
            HAS_LSE=out_lse is not None, num_warps=4 if block_h * block_d >= 512 else 1,
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
