"""What the library's wrappers share: the layers they are for, and a loaded plan run over one."""

from typing import Any

import torch

from sgl_prefix_attn.api import argument_checks as checks
from sgl_prefix_attn.execute.backends.choice import new_backend, row_tile_backend, why_no_backend
from sgl_prefix_attn.execute.backends.kernel_backend import KernelBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.lse import Lse
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.tile_defaults import default_tile_set
from sgl_prefix_attn.predict.startup import default_costs, default_rates
from sgl_prefix_attn.records import Forest, HeadConfig


def row_tiles(
    heads: HeadConfig, dtype: torch.dtype, device: torch.device, page_size: int
) -> tuple[KernelBackend, RowTilePlanner]:
    """Return what runs row tiles, their kernel or torch on a CPU, and what plans them. Raises
    ValueError as row_tile_backend."""
    backend = row_tile_backend(device, heads, dtype)
    rates = default_rates(device, heads, dtype, page_size)
    return backend, RowTilePlanner(heads, num_sms=backend.num_sms, rates=rates)


def packs(
    heads: HeadConfig,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    strategy: str = "calibrated",
) -> tuple[KernelBackend, Planner]:
    """Return what runs packs, Triton or torch on a CPU, and what plans them. Raises ValueError for
    heads or a dtype that they do not take."""
    if why_not := why_no_backend(device, heads, dtype):
        raise ValueError(f"no kernels on {device.type} for {why_not}")
    tile_set = default_tile_set(device, heads)
    costs = default_costs(device, heads, dtype, page_size)
    planner = Planner(heads, tile_set=tile_set, strategy=strategy, costs=costs)
    return new_backend(device, heads, dtype, tile_set), planner


class PlannedAttention:
    """Base of the wrappers, which choose `_planner` and `_backend`; `_seq_lens` and `_max_slot`
    are those of the loaded plan."""

    _planner: Planner | RowTilePlanner
    _backend: KernelBackend
    _seq_lens: torch.Tensor
    _max_slot = -1

    def __init__(
        self,
        heads: HeadConfig,
        page_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
        sm_scale: float | None,
        logits_soft_cap: float,
    ):
        """Raises ValueError naming the argument, as PrefixDecodeWrapper says."""
        self.heads = heads
        self.device = checks.torch_device(device)
        self.sm_scale = (
            heads.head_dim**-0.5 if sm_scale is None else checks.number("sm_scale", sm_scale)
        )
        self.logits_soft_cap = checks.number("logits_soft_cap", logits_soft_cap)
        checks.wrapper_arguments(
            heads.head_dim, page_size, self.device, dtype, self.logits_soft_cap
        )
        self.page_size = page_size
        self.dtype = dtype

    def _use(self, backend: KernelBackend, planner: Planner | RowTilePlanner) -> None:
        self._backend, self._planner = backend, planner
        self._executor = PlanExecutor(backend, Capacity(1, 1, 1))

    def _planned(self) -> Any:
        """Return the loaded plan, one of `_planner`; RuntimeError before there is one."""
        if self._executor.plan is None:
            raise RuntimeError("no plan yet: call plan() or plan_block_table() first")
        return self._executor.plan

    def _load_step(
        self, forest: Forest, name: str, req_to_token: torch.Tensor, pool: torch.Tensor
    ) -> None:
        """Plan and load a step; `name` is the caller's argument that req_to_token [R, C] came
        from, pool [B] the rows of the requests. What is refused leaves the loaded plan."""
        plan = self._planner.plan_forest(forest)
        checks.slots_agree(forest, req_to_token, pool)
        max_slot = checks.max_slot(name, req_to_token, pool, forest.seq_lens)
        capacity = self._executor.capacity
        if not capacity.covers(plan):
            grown = capacity.grown_to(Capacity.for_plans(plan))
            self._executor = PlanExecutor(self._backend, grown)
        self._executor.load(plan, req_to_token.to(self.device, torch.int32), pool.to(self.device))
        self._max_slot = max_slot

    def _run_layer(
        self,
        q: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        return_lse: bool,
        rows: int,
    ) -> torch.Tensor | tuple[torch.Tensor, Lse]:
        """Attend in one layer over the loaded plan, which asks for so many rows of q."""
        k_cache, v_cache = checks.run_tensors(
            q, kv_cache, out, self.heads, self.dtype, self.device, rows, self._max_slot
        )
        if out is None:
            out = torch.empty_like(q)
        if isinstance(self._planner, RowTilePlanner):
            checks.aligned_rows(q=q, k_cache=k_cache, v_cache=v_cache, out=out)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        self._executor.run(
            LayerParams(
                q=q,
                k_cache=k_cache,
                v_cache=v_cache,
                seq_lens=self._seq_lens,
                out=out,
                out_lse=lse,
                sm_scale=self.sm_scale,
                soft_cap=self.logits_soft_cap,
            )
        )
        return out if lse is None else (out, Lse(lse))
