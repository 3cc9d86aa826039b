"""Holds one loaded plan in fixed memory and runs it: Triton on a GPU, torch elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch

from sgl_prefix_attn.execute import reference
from sgl_prefix_attn.kernels import layout
from sgl_prefix_attn.plan.tiles import TileSet
from sgl_prefix_attn.records import HeadConfig, Plan, PlanTooLarge

_UPLOAD_RING = 3  # with overlap scheduling an upload may still be queued when the next is written


@dataclass(frozen=True)
class Capacity:
    """Sizes of an executor's fixed workspace; memory is 4 bytes a word and index slot, and
    num_qo_heads * (head_dim * dtype size + 8) bytes a partial row."""

    words: int
    index_slots: int
    partials: int

    @classmethod
    def for_server(
        cls, max_batch: int, max_tokens: int, headroom: int, tile_set: TileSet
    ) -> Capacity:
        """Enough for max_batch requests over max_tokens KV slots: every slot twice, headroom and
        alignment for every request, and eight parts a request on average. Strategy `query`, which
        lists a shared slot once a request, may need more."""
        ctas = 4 * tile_set.num_sms
        return cls(
            words=layout.HEADER_WORDS + 128 * max_batch + 32 * ctas,
            index_slots=2 * max_tokens + (headroom + 32) * max_batch,
            partials=8 * max_batch + 2 * ctas,
        )

    @classmethod
    def for_plans(cls, *plans: Plan) -> Capacity:
        """Enough for each of the plans, one at a time."""
        return cls(
            words=max(plan.words.size for plan in plans),
            index_slots=max(plan.num_index_slots for plan in plans),
            partials=max(1, *(plan.num_partials for plan in plans)),
        )

    def grown_to(self, need: Capacity) -> Capacity:
        """At least `need`, rounded up to powers of two so that growing stays rare."""
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
        return (
            plan.words.size <= self.words
            and plan.num_index_slots <= self.index_slots
            and plan.num_partials <= self.partials
        )


class PlanExecutor:
    """load() a plan, append() once a step, run() once a layer.

    Everything runs on the current stream; nothing synchronises. Tensor addresses stay the same for
    the executor's lifetime, so append() and run() may be captured in a CUDA graph that later plans
    reuse. `use_triton` defaults to: on a GPU, or under TRITON_INTERPRET=1.
    """

    def __init__(
        self,
        heads: HeadConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        tile_set: TileSet,
        capacity: Capacity,
        parallel_tiles: bool = True,
        use_triton: bool | None = None,
    ):
        self.heads = heads
        self.device = torch.device(device)
        self.capacity = capacity
        if use_triton is None:
            use_triton = self.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
        self.plan: Plan | None = None
        self._launch = None
        if use_triton:
            from sgl_prefix_attn.execute import launch

            self._launch = launch
            self._forward = launch.ForwardLauncher(heads, tile_set, self.device, parallel_tiles)
            self._workspace = launch.new_workspace(
                capacity.words, capacity.index_slots, capacity.partials, heads, dtype, self.device
            )
            self._words, self._kv_indices = self._workspace.words, self._workspace.kv_indices
        else:
            self._words = torch.zeros(capacity.words, dtype=torch.int32, device=self.device)
            self._kv_indices = torch.zeros(
                capacity.index_slots, dtype=torch.int32, device=self.device
            )
        self._upload = _UploadRing(capacity.words) if self.device.type == "cuda" else None

    def load(self, plan: Plan, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor) -> None:
        """Make `plan` the current one and copy the slots of its segments.

        req_to_token int32 [R, C] and req_pool_indices [B] are read now and never again.
        Raises PlanTooLarge, leaving the current plan in place.
        """
        if not self.capacity.covers(plan):
            raise PlanTooLarge(
                f"plan needs {plan.words.size} words, {plan.num_index_slots} index slots and "
                f"{plan.num_partials} partial rows; the workspace has {self.capacity}"
            )
        if self._upload:
            self._upload.send(plan.words, self._words)
        else:
            self._words[: plan.words.size] = torch.from_numpy(plan.words)
        if self._launch:
            longest = int((plan.packs.kv_end - plan.packs.kv_start).max(initial=1))
            self._launch.fill_segments(
                self._workspace, req_to_token, req_pool_indices, plan.packs.kv_start.size, longest
            )
        else:
            reference.fill_segments(self._words, req_to_token, req_pool_indices, self._kv_indices)
        self.plan = plan

    def append(self, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
        """Write this step's slots (out_cache_loc [>= B]) at seq_lens - 1; idempotent."""
        if self._launch:
            self._launch.append(self._workspace, seq_lens, out_cache_loc)
        else:
            reference.append(self._words, seq_lens, out_cache_loc, self._kv_indices)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        *,
        sm_scale: float,
        logits_soft_cap: float = 0.0,
        out_lse: torch.Tensor | None = None,
    ) -> None:
        """Decode attention of one layer into out; rows at and above the plan's batch stay as they
        are. q, out [>= B, Hq, D]; caches [slots, Hkv, D]; out_lse float32 [>= B, Hq], base 2."""
        if self._launch:
            layer = self._launch.Layer(
                q, k_cache, v_cache, seq_lens, out, out_lse, sm_scale, logits_soft_cap
            )
            self._forward(self._workspace, layer)
            return
        batch = self.plan.batch_size
        result, lse = reference.execute(
            self._words, q, k_cache, v_cache, self._kv_indices, seq_lens, self.plan.num_partials,
            sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
        )  # fmt: skip
        out[:batch] = result
        if out_lse is not None:
            out_lse[:batch] = lse.values


class _UploadRing:
    """Pinned host buffers, each reused only after its copy has left the host."""

    def __init__(self, words: int):
        self.buffers = [
            torch.empty(words, dtype=torch.int32, pin_memory=True) for _ in range(_UPLOAD_RING)
        ]
        self.arrays = [buffer.numpy() for buffer in self.buffers]
        self.events = [torch.cuda.Event() for _ in self.buffers]
        self.next = 0

    def send(self, words: np.ndarray, target: torch.Tensor) -> None:
        i = self.next
        self.next = (i + 1) % len(self.buffers)
        self.events[i].synchronize()  # returns at once unless uploads are queued three deep
        self.arrays[i][: words.size] = words
        target[: words.size].copy_(self.buffers[i][: words.size], non_blocking=True)
        self.events[i].record()
