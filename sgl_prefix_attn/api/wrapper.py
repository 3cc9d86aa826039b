"""The library API: prefix-aware decode attention in plan/run manner, without SGLang."""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch

from sgl_prefix_attn.api import argument_checks as checks
from sgl_prefix_attn.api.planned_attention import PlannedAttention, packs, row_tiles
from sgl_prefix_attn.execute.backends.choice import why_no_row_tiles
from sgl_prefix_attn.execute.backends.family import AUTO, ROW_TILES, choose_family
from sgl_prefix_attn.execute.lse import Lse
from sgl_prefix_attn.explain.row_tile_view import tile_views
from sgl_prefix_attn.explain.view import pack_views
from sgl_prefix_attn.paths import block_tables as bt
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.records import HeadConfig, PathTable


class PrefixDecodeWrapper(PlannedAttention):
    """Decode attention that reads KV shared by several requests once.

        wrapper = PrefixDecodeWrapper(32, 8, 128, device="cuda", dtype=torch.bfloat16)
        wrapper.plan(paths, seq_lens, req_to_token, req_pool_indices)
        for layer in layers:
            out = wrapper.run(q, (k_cache, v_cache))
        wrapper.append(out_cache_loc)       # the next step: every request one token longer

    A plan serves every layer. `plan` copies the KV slots; later changes of req_to_token do not
    reach it. plan() allocates workspace when it must grow, so plan the largest step before
    capturing run() and append() in a CUDA graph: later plans that fit reuse the same addresses.
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
        strategy: str = "calibrated",
        kernels: str = AUTO,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
    ):
        """Make a wrapper; sm_scale defaults to head_dim ** -0.5, logits_soft_cap 0 means none.

        strategy  of the packing, for packs
        kernels   "auto": those that a server would run; "triton" (packs; torch on a CPU) or
                  "row_tiles" (Hopper)

        Raises ValueError naming the argument: heads that do not divide, head_dim outside 16-256,
        page_size below 1, a GPU that is not there, dtype other than float16/bfloat16 (or float32 on
        a CPU), unknown strategy or kernels, kernels that cannot run here.
        """
        heads = HeadConfig(num_qo_heads, num_kv_heads, head_dim)
        super().__init__(heads, page_size, device, dtype, sm_scale, logits_soft_cap)
        self._strategy = strategy
        why_not = why_no_row_tiles(self.device, heads, dtype)
        if choose_family(kernels, strategy, why_not).name == ROW_TILES:
            self._use(*row_tiles(heads, dtype, self.device, page_size))
        else:
            self._use(*packs(heads, dtype, self.device, page_size, strategy))
        self._appended = 0
        self._seq_lens = torch.empty(0, dtype=torch.int32, device=self.device)

    def plan(
        self,
        paths: Sequence[Sequence[tuple[int, int]]],
        seq_lens: torch.Tensor | Sequence[int],
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor | Sequence[int],
    ) -> None:
        """Plan a decode step from known prefix paths.

        paths             per request, root first, (node_id, length) of the nodes on its path; two
                          requests with the same leading nodes share those KV slots
        seq_lens          [B] KV tokens of each request, the token being decoded included
        req_to_token      [R, C] KV slot of every position of every row
        req_pool_indices  [B] row of each request

        Raises ValueError naming argument and row: an empty batch, shapes that do not agree, a path
        not shorter than its request, a path that contradicts another's (the same node with another
        length or parent), rows or slots out of range.
        """
        lengths = checks.lengths(seq_lens)
        table = checks.path_table(paths, lengths)
        pool = checks.pool_indices(req_pool_indices, lengths, req_to_token)
        self._load(table, "req_to_token", req_to_token, pool)

    def plan_block_table(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor | Sequence[int]
    ) -> None:
        """Plan a decode step from a block table alone: equal leading pages are shared prefixes.

        block_table [B, pages] of page numbers (KV slots where page_size is 1); entries behind a
        request's last page are ignored. A request's last page stays private, whatever it equals.
        Raises ValueError naming argument and row.
        """
        lengths = checks.lengths(seq_lens)
        checks.block_table(block_table, lengths, self.page_size)
        pages = block_table.cpu().numpy()
        table = bt.shared_paths(pages, lengths, self.page_size)
        slots = bt.token_slots(block_table, self.page_size)
        self._load(table, "block_table", slots, torch.arange(lengths.size, device=self.device))

    def append(self, out_cache_loc: torch.Tensor) -> None:
        """Make every request one token longer, at slot out_cache_loc [B]; the plan stays.

        Raises RuntimeError when the plan's headroom is full: plan again. ValueError naming
        out_cache_loc for a wrong shape or dtype and, where it is in host memory, a negative slot.
        """
        plan = self._planned()
        largest = checks.append_slots(out_cache_loc, plan.batch_size)
        if self._appended >= plan.appends_left:
            raise RuntimeError(
                f"the plan's headroom of {plan.appends_left} tokens is full: call plan() again"
            )
        self._max_slot = max(self._max_slot, largest)
        self._seq_lens += 1
        self._appended += 1
        self._executor.append(self._seq_lens, out_cache_loc.to(self.device))

    def run(
        self,
        q: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Lse]:
        """Attend in one layer: q [B, Hq, D], kv_cache = (k, v), each [slots, Hkv, D].

        Returns out [B, Hq, D] (the given one, if given) and, with return_lse, an Lse [B, Hq].
        Raises ValueError naming the argument for shapes, dtypes or devices that do not fit the
        plan, RuntimeError before plan().
        """
        rows = self._planned().batch_size
        return self._run_layer(q, kv_cache, out, return_lse, rows)

    def explain(self) -> dict:
        """Return the plan as plain data: statistics, and either each pack's queries and KV
        positions or each row tile's requests, what they read when planned, and parts."""
        plan = self._planned()
        facts = {
            "strategy": self._strategy,
            "batch_size": plan.batch_size,
            "appended": self._appended,
            **asdict(plan.stats),
        }
        if isinstance(self._planner, RowTilePlanner):
            return facts | {"tiles": [asdict(tile) for tile in tile_views(plan, self._planner)]}
        return facts | {
            "packs": [
                {
                    "queries": list(pack.requests),
                    "kv_start": pack.start,
                    "kv_end": pack.end + (self._appended if pack.grows else 0),
                    "grows": pack.grows,
                }
                for pack in pack_views(plan)
            ],
        }

    def _load(
        self, table: PathTable, name: str, req_to_token: torch.Tensor, pool: torch.Tensor
    ) -> None:
        """Plan and load; `name` is the caller's argument that req_to_token [R, C] came from."""
        self._load_step(build_forest(table), name, req_to_token, pool)
        lengths = torch.from_numpy(np.ascontiguousarray(table.seq_lens)).to(self.device)
        if self._seq_lens.numel() >= lengths.numel():
            self._seq_lens[: lengths.numel()] = lengths  # same address: graphs may hold it
        else:
            self._seq_lens = lengths
        self._appended = 0
