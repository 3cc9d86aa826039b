"""What a family of kernels offers: the protocol that the executor drives."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from sgl_prefix_attn.execute.params import Capacity, LayerParams, Workspace
from sgl_prefix_attn.records import HeadConfig, StepPlan


@dataclass(frozen=True)
class Capabilities:
    """Models that a backend can run; bounds are inclusive."""

    head_dims: tuple[int, int]
    group_sizes: tuple[int, int]
    dtypes: frozenset[torch.dtype]

    def why_not(self, heads: HeadConfig, dtype: torch.dtype) -> str | None:
        """Say why a model with such layers cannot be run, as a label of metrics, or None."""
        if dtype not in self.dtypes:
            return f"dtype:{str(dtype).removeprefix('torch.')}"
        for name, (least, most) in (("head_dim", self.head_dims), ("group_size", self.group_sizes)):
            if not least <= getattr(heads, name) <= most:
                return f"{name}:{getattr(heads, name)}"
        return None

    def describe(self) -> str:
        """Say which models can be run."""
        dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return (
            f"{', '.join(dtypes)}; heads of {self.head_dims[0]} to {self.head_dims[1]} dimensions; "
            f"{self.group_sizes[0]} to {self.group_sizes[1]} query heads per KV head"
        )


class KernelBackend(Protocol):
    """Kernels over one layout of a plan's words, for one head configuration.

    A workspace is one of the backend's own new_workspace(), a plan one of its family's planner.
    Everything runs on the current stream; nothing synchronises. append() and forward() may be
    captured in a CUDA graph that later plans of the same workspace reuse.
    """

    layout_version: ClassVar[int]
    capabilities: ClassVar[Capabilities]

    def new_workspace(self, capacity: Capacity) -> Workspace:
        """Allocate the memory that all plans of this backend are loaded into."""

    def fill(
        self,
        workspace: Any,
        plan: StepPlan,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> None:
        """Copy the KV slots of the plan's segments, whose words are in the workspace already.

        req_to_token int32 [rows, positions], req_pool_indices int [>= B] row of each request.
        """

    def append(self, workspace: Any, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
        """Write the newest slot of each request, out_cache_loc int [>= B], at seq_lens - 1.

        Idempotent.
        """

    def forward(self, workspace: Any, layer: LayerParams) -> None:
        """Compute attention of one layer; padding rows stay as they are."""
