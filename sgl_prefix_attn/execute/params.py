"""What kernels are launched with, the shape beside each field.

B is the number of requests, Hq and Hkv are query and KV heads of this rank, D is the head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_prefix_attn.kernels import layout
from sgl_prefix_attn.plan.tiles import TileSet
from sgl_prefix_attn.records import HeadConfig, Plan


@dataclass(frozen=True)
class Capacity:
    """Sizes of an executor's fixed workspace.

    Memory is 4 bytes per word and index slot, and num_qo_heads * (head_dim * dtype size + 8) bytes
    per partial row.
    """

    words: int
    index_slots: int
    partials: int

    @classmethod
    def for_server(
        cls, max_batch: int, max_tokens: int, headroom: int, tile_set: TileSet
    ) -> Capacity:
        """Return enough for max_batch requests over max_tokens KV slots.

        Every slot twice, headroom and alignment for every request, and eight parts per request on
        average. Strategy `query`, which lists a shared slot once per request, may need more.
        """
        ctas = 4 * tile_set.num_sms
        return cls(
            words=layout.HEADER_WORDS + 128 * max_batch + 32 * ctas,
            index_slots=2 * max_tokens + (headroom + 32) * max_batch,
            partials=8 * max_batch + 2 * ctas,
        )

    @classmethod
    def for_plans(cls, *plans: Plan) -> Capacity:
        """Return enough for each of the plans, one at a time."""
        return cls(
            words=max(plan.words.size for plan in plans),
            index_slots=max(plan.num_index_slots for plan in plans),
            partials=max(1, *(plan.num_partials for plan in plans)),
        )

    def grown_to(self, need: Capacity) -> Capacity:
        """Return at least `need`, in powers of two so that growing stays rare."""
        return Capacity(
            *(
                max(have, 1 << (want - 1).bit_length())
                for have, want in zip(
                    (self.words, self.index_slots, self.partials),
                    (need.words, need.index_slots, need.partials),
                    strict=True,
                )
            )
        )

    def covers(self, plan: Plan) -> bool:
        """Tell whether a workspace of this size holds the plan."""
        return (
            plan.words.size <= self.words
            and plan.num_index_slots <= self.index_slots
            and plan.num_partials <= self.partials
        )


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
