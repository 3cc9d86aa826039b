"""What kernels are launched with, the shape beside each field.

B is the number of requests, Hq and Hkv are query and KV heads of this rank, D is the dim of queries
and keys, Dv that of values and outputs: the same but for latent KV (HeadConfig).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.capacity import Capacity
from sgl_prefix_attn.records import HeadConfig


@dataclass(frozen=True)
class Workspace:
    """Device memory of one plan; its addresses never change, so that graphs may hold it.

    words          int32 [words]                the plan
    kv_indices     int32 [blocks * BLOCK]       slots of every block
    keys           int32 [blocks * BLOCK]       for which queries each column is
    partial_out    [partials, Hq, Dv]  float16 for half-precision models, float32 for others and for
                   aligned plans; used as [partial tiles, Hkv, tile_rows, Dv], and as it is for the
                   places behind them
    partial_state  float32 [partials, Hq, 2]    used as [partial tiles, Hkv, tile_rows, 2]: LSE in
                   base 2, scale of the row; for aligned plans maximum and sum
    counters       int32 [2 + partials * Hkv]   a queue, parts that are done; 0 between forwards
    """

    words: torch.Tensor
    kv_indices: torch.Tensor
    keys: torch.Tensor
    partial_out: torch.Tensor
    partial_state: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def allocate(
        cls,
        capacity: Capacity,
        heads: HeadConfig,
        partial_dtype: torch.dtype,
        device: torch.device,
        tile_rows: int,
    ) -> Workspace:
        """Allocate a workspace with an empty plan in it (no requests, no items)."""
        rows = (capacity.partials, heads.num_qo_heads)
        words = torch.zeros(capacity.words, dtype=torch.int32, device=device)
        words[W.H_TILE_ROWS] = tile_rows
        kv_indices = torch.zeros(capacity.index_slots, dtype=torch.int32, device=device)
        # a counter for each place; a split tile, with at least two partial tiles, has two counters
        counters = 2 + capacity.partials * heads.num_kv_heads
        return cls(
            words=words,
            kv_indices=kv_indices,
            keys=torch.zeros_like(kv_indices),
            partial_out=torch.empty(*rows, heads.value_dim, dtype=partial_dtype, device=device),
            partial_state=torch.empty(*rows, 2, dtype=torch.float32, device=device),
            counters=torch.zeros(counters, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class LayerParams:
    """One layer's tensors. Rows at and above the plan's batch are padding.

    q         [>= B, Hq, D], or [>= B, Hq, Dv] where q_rope is its rest
    out       [>= B, Hq, Dv]
    k_cache   [slots, Hkv, D], like q or float8_e4m3fn
    v_cache   [slots, Hkv, Dv], as k_cache; of latent KV a view of it
    out_lse   float32 [>= B, Hq] in base 2, or None: not wanted
    soft_cap  of the logits, by tanh; 0 means none
    sinks     [Hq], or None: a logit of each query head, neither scaled nor capped, that is in the
              softmax's denominator and has no value. Kernels are compiled for each dtype of them.
    k_scale   what keys of float8_e4m3fn are multiplied by, before the cap
    v_scale   what values of float8_e4m3fn are multiplied by
    q_rope    [>= B, Hq, D - Dv], the last elements of queries to latent KV, or None: they are in q

    The LSE is the logarithm of the denominator: with sinks they are in it, as in FlashInfer and
    FlashAttention. Results over other KV must be merged before the sinks are added.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    out_lse: torch.Tensor | None
    sm_scale: float
    soft_cap: float
    sinks: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    q_rope: torch.Tensor | None = None
