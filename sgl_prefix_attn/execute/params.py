"""What kernels are launched with, the shape beside each field.

B is the number of requests, Hq and Hkv are query and KV heads of this rank, D is the head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_prefix_attn.kernels import layout
from sgl_prefix_attn.plan.capacity import Capacity
from sgl_prefix_attn.records import HeadConfig


@dataclass(frozen=True)
class Workspace:
    """Device memory that the kernels share; its addresses never change, so that graphs may hold it.

    words          int32 [words]               the plan
    kv_indices     int32 [index slots]         KV slots of every segment
    partial_out    [partials, Hq, D]           float16 for half-precision models, else float32
    partial_state  float32 [partials, Hq, 2]   LSE in base 2, scale of the row
    tickets        int32 [MAX_TILES]           0 between forwards
    """

    words: torch.Tensor
    kv_indices: torch.Tensor
    partial_out: torch.Tensor
    partial_state: torch.Tensor
    tickets: torch.Tensor

    @classmethod
    def allocate(
        cls, capacity: Capacity, heads: HeadConfig, dtype: torch.dtype, device: torch.device
    ) -> Workspace:
        """Allocate a workspace with an empty plan in it (no requests, no items)."""
        rows = (capacity.partials, heads.num_qo_heads)
        partial_dtype = torch.float32 if dtype == torch.float32 else torch.float16
        words = torch.zeros(capacity.words, dtype=torch.int32, device=device)
        words[layout.H_VERSION] = layout.VERSION
        return cls(
            words=words,
            kv_indices=torch.zeros(capacity.index_slots, dtype=torch.int32, device=device),
            partial_out=torch.empty(*rows, heads.head_dim, dtype=partial_dtype, device=device),
            partial_state=torch.empty(*rows, 2, dtype=torch.float32, device=device),
            tickets=torch.zeros(layout.MAX_TILES, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class LayerParams:
    """One layer's tensors. Rows at and above the plan's batch are padding.

    q, out    [>= B, Hq, D]
    k_cache   [slots, Hkv, D]
    v_cache   [slots, Hkv, D]
    seq_lens  int [>= B]
    out_lse   float32 [>= B, Hq] in base 2, or None: not wanted
    soft_cap  of the logits, by tanh; 0 means none
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    out_lse: torch.Tensor | None
    sm_scale: float
    soft_cap: float
