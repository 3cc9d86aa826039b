"""Holds one loaded plan in fixed memory and runs it on a kernel backend."""

import numpy as np
import torch

from sgl_prefix_attn.execute.backends.kernel_backend import KernelBackend
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.plan.plan import Plan

_UPLOAD_RING = 3  # with overlap scheduling an upload may still be queued when the next is written


class PlanExecutor:
    """load() a plan, append() once per step, run() once per layer.

    Everything runs on the current stream; nothing synchronises. Tensor addresses stay the same for
    the executor's lifetime, so append() and run() may be captured in a CUDA graph that later plans
    reuse.
    """

    def __init__(self, backend: KernelBackend, capacity: Capacity):
        self.capacity = capacity
        self.backend = backend
        self.plan: Plan | None = None
        self.workspace = backend.new_workspace(capacity)
        on_gpu = self.workspace.words.device.type == "cuda"
        self._upload = _UploadRing(capacity.words) if on_gpu else None

    def load(self, plan: Plan, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor) -> None:
        """Make `plan` the current one and copy the slots of its segments.

        req_to_token int32 [rows, positions] and req_pool_indices [B], of any strides, are read now
        and never again.
        Raises PlanTooLarge, or ValueError for a plan that is not for these kernels; either leaves
        the current plan in place, as does running out of memory for a copy of the table.
        """
        self.capacity.check(plan)
        self.backend.check(plan)
        # Kernels read rows and slots one after another.
        table, rows = req_to_token.contiguous(), req_pool_indices.contiguous()
        self.plan = None  # what fails from here on leaves neither this plan nor the one before
        if self._upload:
            self._upload.send(plan.words, self.workspace.words)
        else:
            self.workspace.words[: plan.words.size] = torch.from_numpy(plan.words)
        self.backend.fill(self.workspace, plan, table, rows)
        self.plan = plan

    def append(self, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
        """Write this step's slots (out_cache_loc [>= B], of any stride) at seq_lens - 1;
        idempotent."""
        self.backend.append(self.workspace, seq_lens, out_cache_loc.contiguous())

    def run(self, layer: LayerParams) -> None:
        """Compute attention of one layer into layer.out; padding rows stay as they are."""
        self.backend.forward(self.workspace, layer)


class _UploadRing:
    """Pinned host buffers, each reused only after its copy has left the host."""

    def __init__(self, words: int):
        self.buffers = [
            torch.empty(words, dtype=torch.int32, device="cpu", pin_memory=True)
            for _ in range(_UPLOAD_RING)
        ]
        self.events = [torch.cuda.Event() for _ in self.buffers]
        self.next = 0

    def send(self, words: np.ndarray, target: torch.Tensor) -> None:
        i = self.next
        self.next = (i + 1) % len(self.buffers)
        self.events[i].synchronize()  # returns at once unless uploads are queued three deep
        self.buffers[i].numpy()[: words.size] = words
        target[: words.size].copy_(self.buffers[i][: words.size], non_blocking=True)
        self.events[i].record()
