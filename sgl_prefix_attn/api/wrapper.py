"""The library API: prefix-aware attention in plan/run manner, without SGLang."""

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch

from sgl_prefix_attn.api import argument_checks as checks
from sgl_prefix_attn.api.families import kernels_and_planner
from sgl_prefix_attn.api.layer_tensors import aligned_rows, head_sinks, run_tensors, slot_caches
from sgl_prefix_attn.execute.backends.choice import why_no_hopper
from sgl_prefix_attn.execute.backends.family import AUTO, choose_family
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.lse import Lse
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.paths import block_tables as bt
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.view import tile_views
from sgl_prefix_attn.records import CALIBRATED, HeadConfig, PathTable


class PrefixAttentionWrapper:
    """Causal attention of each request's newest tokens that reads KV shared by several requests
    once.

        wrapper = PrefixAttentionWrapper(32, 8, 128, device="cuda", dtype=torch.bfloat16)
        wrapper.plan_block_table(block_table, seq_lens)
        for layer in layers:
            out = wrapper.run(q, (k_cache, v_cache))
        wrapper.append(out_cache_loc)       # the next step: every request one token longer

    Without query_lens a plan decodes: one token of each request attends, and append() carries the
    plan from step to step. With query_lens it serves one step: request r's query_lens[r] newest
    tokens, the last of its seq_lens[r], attend, each to itself and to all before it: a draft's
    tokens where it verifies, a chunk where it prefills, one where it decodes. K and V of all of
    them are in the caches before run().

    A plan serves every layer. `plan` copies the KV slots; later changes of req_to_token do not
    reach it. plan() allocates workspace when it must grow, so plan the largest step before
    capturing run() and append() in a CUDA graph: later plans that fit reuse the same addresses.
    A replayed append() is not counted here: plan again after `appends_left` of them.
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 1,
        device: torch.device | str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        strategy: str = CALIBRATED,
        kernels: str = AUTO,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
    ):
        """Make a wrapper; sm_scale is positive and defaults to head_dim ** -0.5, logits_soft_cap 0
        means none.

        kv_dtype  of the caches, where it is not dtype: float8_e4m3fn
        strategy  of splitting and merging the nodes of shared KV, where kernels are not Hopper's
        kernels   "auto": those that a server would run; "hopper", or "portable" (Triton, from sm_80
                  on; torch on a CPU)

        Raises ValueError naming the argument: heads that do not divide, head_dim outside 16-256,
        page_size below 1, a GPU that is not there, dtype other than float16/bfloat16 (or float32 on
        a CPU), a kv_dtype that no kernels here read, unknown strategy or kernels, kernels that
        cannot run here, another strategy than "calibrated" where "auto" is Hopper's.
        """
        self.heads = heads = HeadConfig(num_qo_heads, num_kv_heads, head_dim)
        self.device, self.sm_scale, self.logits_soft_cap = checks.layer_arguments(
            head_dim, page_size, device, dtype, sm_scale, logits_soft_cap
        )
        self.page_size, self.dtype = page_size, dtype
        self.kv_dtype = kv_dtype = dtype if kv_dtype is None else kv_dtype
        checks.kv_dtype(kv_dtype, dtype)
        why_not = why_no_hopper(self.device, heads, dtype, kv_dtype)
        family = choose_family(kernels, strategy, why_not).name
        backend, self._planner = kernels_and_planner(
            family, heads, dtype, self.device, page_size, strategy, kv_dtype
        )
        self._executor = PlanExecutor(backend, Capacity(1, 1, 1))  # grows with the plans
        self._appended, self._max_slot = 0, -1
        self._query_lens: np.ndarray | None = None
        self._seq_lens = torch.empty(0, dtype=torch.int32, device=self.device)

    def plan(
        self,
        paths: Sequence[Sequence[tuple[int, int]]],
        seq_lens: torch.Tensor | Sequence[int],
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor | Sequence[int],
        query_lens: torch.Tensor | Sequence[int] | None = None,
    ) -> None:
        """Plan a step from known prefix paths.

        paths             per request, root first, (node_id, length) of the nodes on its path; two
                          requests with the same leading nodes share those KV slots
        seq_lens          [B] KV tokens of each request, those that attend included
        req_to_token      [R, C] KV slot of every position of every row
        req_pool_indices  [B] row of each request
        query_lens        [B] how many of each request's newest tokens attend; None: it decodes

        Raises ValueError naming argument and row: an empty batch, shapes that do not agree, a path
        that holds a token that attends or contradicts another's (the same node with another length
        or parent), rows or slots out of range.
        """
        lengths = checks.lengths(seq_lens)
        lens = checks.query_lens(query_lens, lengths)
        table = checks.path_table(paths, lengths, lens)
        pool = checks.pool_indices(req_pool_indices, lengths, req_to_token)
        self._load(table, lens, "req_to_token", req_to_token, pool)

    def plan_block_table(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor | Sequence[int],
        query_lens: torch.Tensor | Sequence[int] | None = None,
    ) -> None:
        """Plan a step from a block table alone: equal leading pages are shared prefixes.

        block_table [B, pages] of page numbers (KV slots where page_size is 1); entries behind a
        request's last page are ignored. Pages with a token that attends stay private, whatever
        they equal. seq_lens, query_lens and errors are those of plan().
        """
        lengths = checks.lengths(seq_lens)
        lens = checks.query_lens(query_lens, lengths)
        checks.block_table(block_table, lengths, self.page_size)
        before = lengths if lens is None else lengths - lens + 1
        pages = block_table[:, : -(-int(lengths.max()) // self.page_size)]  # it may be far wider
        table = bt.shared_paths(pages.cpu().numpy(), before, self.page_size)
        slots = bt.token_slots(pages, self.page_size)
        rows = torch.arange(lengths.size, device=self.device)
        self._load(replace(table, seq_lens=lengths), lens, "block_table", slots, rows)

    def append(self, out_cache_loc: torch.Tensor) -> None:
        """Make every request one token longer, at slot out_cache_loc [B]; the plan stays.

        Raises RuntimeError when the plan's headroom is full or it has query_lens: plan again.
        ValueError naming out_cache_loc for a wrong shape or dtype and, where it is in host memory,
        a negative slot. One that run()'s caches do not have is refused there, until a new plan.
        """
        plan = self._planned()
        if self._query_lens is not None:
            raise RuntimeError("a plan with query_lens serves one step: call plan() again")
        largest = checks.append_slots(out_cache_loc, plan.batch_size)
        if self._appended >= plan.appends_left:
            raise RuntimeError(
                f"the plan's headroom of {plan.appends_left} tokens is full: call plan() again"
            )
        slots = out_cache_loc.to(self.device)
        self._max_slot = max(self._max_slot, largest)
        self._seq_lens += 1
        self._appended += 1
        with self._on_device():
            self._executor.append(self._seq_lens, slots)

    @property
    def appends_left(self) -> int:
        """How many more tokens append() can give each request of the plan."""
        left = self._planned().appends_left - self._appended
        return left if self._query_lens is None else 0

    def run(
        self,
        q: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor | tuple[torch.Tensor, Lse]:
        """Attend in one layer: q [Q, Hq, D], kv_cache = (k, v), each [slots, Hkv, D] or, as a view
        of such slots, [pages, page_size, Hkv, D].

        Q is B or the sum of query_lens; rows stand in the order of the requests, and of a request
        in that of its tokens. sinks float32 [Hq], or None, are the layer's attention sinks: a logit
        of each query head without a value, neither scaled nor capped, that the LSE includes.
        k_scale, which is positive, and v_scale are what the elements of caches of another dtype are
        multiplied by. No gradients are computed. With Hopper's kernels no other wrapper may run on
        the GPU at the same time.
        Rows of q, caches and out begin at multiples of 16 bytes. A value that a request sees and
        that is no finite number makes its results of all heads over that KV head NaN, the LSE, too.
        Returns out [Q, Hq, D] (the given one, if given, which shares no memory with q or caches)
        and, with return_lse, an Lse [Q, Hq].
        Raises ValueError naming the argument for shapes, dtypes or devices that do not fit the
        plan, RuntimeError before plan().
        """
        batch, lens = self._planned().batch_size, self._query_lens
        k_cache, v_cache = slot_caches(kv_cache, self.page_size)
        rows = batch if lens is None else int(lens.sum())
        run_tensors(
            q, k_cache, v_cache, out, self.heads, (self.dtype, self.kv_dtype), self.device, rows,
            self._max_slot,
        )  # fmt: skip
        scales = checks.kv_scales(k_scale, v_scale, self.kv_dtype != self.dtype)
        head_sinks(sinks, self.heads.num_qo_heads, self.device)
        out = torch.empty_like(q) if out is None else out
        aligned_rows(q, k_cache, v_cache, out)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        layer = LayerParams(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            self.sm_scale,
            self.logits_soft_cap,
            sinks,
            *scales,
        )
        with self._on_device(), torch.no_grad():
            self._executor.run(layer)
        return out if lse is None else (out, Lse(lse))

    def explain(self) -> dict:
        """Return the plan as plain data: statistics, and each tile's requests, what they read when
        planned, and its parts."""
        plan, planner = self._planned(), self._planner
        tiles = tile_views(plan, planner, self._query_lens)
        return {
            "strategy": planner.strategy,
            "batch_size": plan.batch_size,
            "appended": self._appended,
            **asdict(plan.stats),
            "tiles": [asdict(tile) for tile in tiles],
        }

    def _planned(self) -> Plan:
        """Return the current plan; RuntimeError before there is one."""
        if self._executor.plan is None:
            raise RuntimeError("no plan yet: call plan() or plan_block_table() first")
        return self._executor.plan

    def _load(
        self,
        table: PathTable,
        lens: np.ndarray | None,
        name: str,
        req_to_token: torch.Tensor,
        pool: torch.Tensor,
    ) -> None:
        """Plan and load a step; `name` is the caller's argument that req_to_token [R, C] came
        from, pool [B] the rows of the requests. What is refused, or finds no memory, leaves the
        current plan."""
        forest = build_forest(table, lens)
        plan = self._planner.plan_forest(forest)
        checks.slots_agree(forest, req_to_token, pool)
        max_slot = checks.max_slot(name, req_to_token, pool, table.seq_lens)
        # What is made here may be changed in or outside of inference mode.
        with self._on_device(), torch.inference_mode(False):
            slots, rows = self._int32_slots(req_to_token, pool, int(table.seq_lens.max()))
            lengths = torch.from_numpy(np.ascontiguousarray(table.seq_lens)).to(self.device)
            executor = self._executor
            if not executor.capacity.covers(plan):
                grown = executor.capacity.grown_to(Capacity.for_plans(plan))
                executor = PlanExecutor(executor.backend, grown)
            executor.load(plan, slots, rows)
            self._executor = executor
            self._query_lens = lens
            self._max_slot, self._appended = max_slot, 0
            if self._seq_lens.numel() >= lengths.numel():
                self._seq_lens[: lengths.numel()] = lengths  # same address: graphs may hold it
            else:
                self._seq_lens = lengths

    def _int32_slots(
        self, table: torch.Tensor, pool: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a table of slots as kernels read it, and the requests' rows in it. Where it must
        be copied, only what requests hold is: it may have rows of many others."""
        if table.dtype == torch.int32 and table.device == self.device and table.is_contiguous():
            return table, pool.to(self.device)
        used = table[pool.to(table.device), :longest].to(self.device, torch.int32)
        return used, torch.arange(len(pool), device=self.device)

    def _on_device(self):
        """Make the wrapper's GPU the current one: kernels are launched there. Of a CPU, make it the
        default device: what stands for kernels makes tensors."""
        return self.device if self.device.type == "cpu" else torch.cuda.device(self.device)
