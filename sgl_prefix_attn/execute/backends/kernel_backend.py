"""What all kernel backends share: what they can run, a plan's memory, and what fills its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton

from sgl_prefix_attn.execute.params import Capacity, LayerParams, Workspace
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.kernels.slots import append_token_kernel, fill_blocks_kernel
from sgl_prefix_attn.plan.capacity import UNLIMITED
from sgl_prefix_attn.plan.kernel_rates import KernelRates
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.plan.server_capacity import Served, aligned_capacity, usual_capacity
from sgl_prefix_attn.records import CALIBRATED, HeadConfig

NARROW_KV = torch.float8_e4m3fn  # of KV caches, beside a model's own dtype
ANY_DIM = 1 << 16  # of a backend without a largest head dimension
_FILL_STEP = 1024


def kv_dtype_label(kv_dtype: torch.dtype) -> str:
    """Name a KV cache's dtype as what stands against a model."""
    return f"kv_dtype:{str(kv_dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Capabilities:
    """Models that a backend can run; bounds are inclusive. kv_dtypes: of KV caches that are unlike
    the model; latent: whether values may be a part of keys."""

    head_dims: tuple[int, int]
    group_sizes: tuple[int, int]
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype] = frozenset()
    latent: bool = False

    def why_not(
        self, heads: HeadConfig, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        """Say why a model with such layers, whose KV cache is of `kv_dtype` or like the model,
        cannot be run, as a label of metrics, or None."""
        if heads.latent_dim is not None and not self.latent:
            return "layers:latent"
        if dtype not in self.dtypes:
            return f"dtype:{str(dtype).removeprefix('torch.')}"
        if kv_dtype is not None and kv_dtype not in (dtype, *self.kv_dtypes):
            return kv_dtype_label(kv_dtype)
        for name, (least, most) in (("head_dim", self.head_dims), ("group_size", self.group_sizes)):
            if not least <= getattr(heads, name) <= most:
                return f"{name}:{getattr(heads, name)}"
        return None

    def describe(self) -> str:
        """Say which models can be run."""
        dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        least, most = self.head_dims
        dims = "any number of" if most == ANY_DIM else f"{least} to {most}"
        return (
            f"{', '.join(dtypes)}; heads of {dims} dimensions; "
            f"{self.group_sizes[0]} to {self.group_sizes[1]} query heads per KV head"
        )


def resident_ctas(device: torch.device) -> int:
    """Count the CTAs of a kernel whose parts wait for one another: one an SM, because one more
    would wait for parts of CTAs that cannot start; 1 without a GPU."""
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1


class KernelBackend:
    """Runs plans of one head configuration; a backend adds forward().

    tile_rows  rows of the tiles of plans that it runs
    num_sms    CTAs that its kernel has at once, as the planner counts them
    part_tokens  KV positions of a part of aligned plans, whose results do not depend on what else a
                 batch holds; 0: it runs plans that are not aligned

    splits_nodes says whether it merges results by query, so that plans may split nodes off.

    Everything runs on the current stream; nothing synchronises. append() and forward() may be
    captured in a CUDA graph that later plans of the same workspace reuse.
    """

    capabilities: ClassVar[Capabilities]
    splits_nodes: ClassVar[bool] = False

    def __init__(
        self, heads: HeadConfig, dtype: torch.dtype, device: torch.device,
        tile_rows: int, num_sms: int, part_tokens: int = 0,
    ):  # fmt: skip
        self.heads, self.tile_rows, self.num_sms = heads, tile_rows, num_sms
        self.part_tokens = part_tokens
        self.dtype, self.device = dtype, device
        self._written = True  # by a fill or append, since the last launch

    def planner(
        self,
        rates: KernelRates,
        *,
        strategy: str = CALIBRATED,
        headroom: int = 64,
        capacity: Capacity = UNLIMITED,
    ) -> Planner:
        """Make what plans for this kernel by its rates. Raises ValueError as Planner."""
        return Planner(
            self.heads,
            num_sms=self.num_sms,
            rates=rates,
            headroom=headroom,
            capacity=capacity,
            tile_rows=self.tile_rows,
            strategy=strategy,
            splits_nodes=self.splits_nodes,
            part_tokens=self.part_tokens,
        )

    def server_capacity(
        self, max_batch: int, max_tokens: int, headroom: int, longest: int | None = None,
        max_requests: int | None = None,
    ) -> Capacity:  # fmt: skip
        """Return enough for max_batch queries over max_tokens KV slots, of max_requests (None: as
        many) requests of up to `longest` tokens (None: as there are slots)."""
        most = Served(
            max_batch, max_requests or max_batch, max_tokens, longest or max_tokens, headroom
        )
        shape = self.heads, self.tile_rows, self.num_sms
        if self.part_tokens:
            return aligned_capacity(*shape, self.part_tokens, most)
        return usual_capacity(*shape, self.splits_nodes, most)

    def workspace_bytes(self, capacity: Capacity) -> int:
        """Count the bytes that new_workspace allocates."""
        made = self._allocate(capacity, torch.device("meta"))
        return sum(tensor.nbytes for tensor in vars(made).values())

    def new_workspace(self, capacity: Capacity) -> Workspace:
        """Allocate the memory that all plans of this backend are loaded into."""
        return self._allocate(capacity, self.device)

    def _allocate(self, capacity: Capacity, device: torch.device) -> Workspace:
        # every CTA asks for its first blocks' slots before it knows whether it has an item, one
        # without reads the first item's words, and flags are read two words behind an item's last
        first_blocks = W.PRE * (self.num_sms // self.heads.num_kv_heads + 2) * W.BLOCK
        first_words = W.HEADER_WORDS + W.item_words(self.heads.group_size, self.tile_rows)
        sized = Capacity(
            max(capacity.words, first_words) + 2,
            max(capacity.index_slots, first_blocks),
            max(capacity.partials, 1),
        )
        # partial results in half precision would round a row by how it is split
        exact = bool(self.part_tokens) or self.dtype == torch.float32
        partials = torch.float32 if exact else torch.float16
        return Workspace.allocate(sized, self.heads, partials, device, self.tile_rows)

    def fill(
        self,
        workspace: Workspace,
        plan: Plan,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ) -> None:
        """Copy the KV slots of the plan's segments, whose words are in the workspace already.

        req_to_token int32 [rows, positions], req_pool_indices int [>= B] row of each request.
        """
        self._written = True
        segments = int(plan.words[W.H_NUM_SEGMENTS])
        if segments:
            fill_blocks_kernel[(segments, min(64, triton.cdiv(plan.longest, _FILL_STEP)))](
                workspace.words, req_to_token, req_pool_indices, workspace.kv_indices,
                workspace.keys, req_to_token.stride(0), STEP=_FILL_STEP,
            )  # fmt: skip

    def check(self, plan: Plan) -> None:
        """Raise ValueError for a plan that is not for this kernel."""
        rows = int(plan.words[W.H_TILE_ROWS])
        if rows != self.tile_rows:
            raise ValueError(f"the plan's tiles have {rows} rows, the kernel's {self.tile_rows}")
        part_tokens = int(plan.words[W.H_PART_TOKENS])
        if part_tokens != self.part_tokens:
            raise ValueError(
                f"the plan's parts have {part_tokens} positions, the kernel's {self.part_tokens} "
                "(0: plans that are not aligned)"
            )
        if plan.words[W.H_MERGES] and not self.splits_nodes:
            raise ValueError("the plan splits nodes off, and the kernel does not merge by query")

    def append(
        self, workspace: Workspace, seq_lens: torch.Tensor, out_cache_loc: torch.Tensor
    ) -> None:
        """Write the newest slot of each request, out_cache_loc int [>= B], at seq_lens - 1.

        Idempotent.
        """
        self._written = True
        append_token_kernel[(1,)](
            workspace.words, seq_lens, out_cache_loc, workspace.kv_indices, workspace.keys,
            STEP=1024,
        )  # fmt: skip

    @staticmethod
    def _arguments(workspace: Workspace, layer: LayerParams) -> tuple:
        """What the kernels over separate keys and values (Hopper's, the portable one) take before
        their constants, in their order."""
        caches = layer.k_cache, layer.v_cache
        return (
            layer.q, *caches, layer.out,
            workspace.partial_state if layer.out_lse is None else layer.out_lse,
            workspace.partial_out, workspace.partial_state, workspace.counters, workspace.words,
            workspace.kv_indices, workspace.keys, layer.sinks,
            *(tensor.stride(0) for tensor in (layer.q, *caches, layer.out)),
            layer.sm_scale * layer.k_scale, layer.soft_cap, layer.v_scale,
        )  # fmt: skip

    def forward(self, workspace: Workspace, layer: LayerParams) -> None:
        """Compute attention of one layer; padding rows stay as they are."""
        raise NotImplementedError
