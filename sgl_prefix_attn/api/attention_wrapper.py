"""The library API for several query tokens a request: verification and prefill over a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sgl_prefix_attn.api import argument_checks as checks
from sgl_prefix_attn.api.planned_attention import PlannedAttention, row_tiles
from sgl_prefix_attn.execute.lse import Lse
from sgl_prefix_attn.paths import block_tables as bt
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.records import HeadConfig, PathTable


class PrefixAttentionWrapper(PlannedAttention):
    """Causal attention of each request's newest tokens that reads shared KV once.

        wrapper = PrefixAttentionWrapper(32, 8, 128, device="cuda", dtype=torch.bfloat16)
        wrapper.plan_block_table(block_table, seq_lens, query_lens)
        for layer in layers:
            out = wrapper.run(q, (k_cache, v_cache))    # q [sum(query_lens), 32, 128]

    Request r's query_lens[r] newest tokens, the last of its seq_lens[r], attend, each to itself and
    to all before it: 1 where it decodes, a draft's tokens where it verifies, a chunk where it
    prefills. K and V of all of them are in the caches before run().

    A plan serves every layer of one step. `plan` copies the KV slots; later changes of req_to_token
    do not reach it. plan() allocates workspace when it must grow, so plan the largest step before
    capturing run() in a CUDA graph: later plans that fit reuse the same addresses.
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
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
    ):
        """Make a wrapper; sm_scale defaults to head_dim ** -0.5, logits_soft_cap 0 means none.

        Raises ValueError naming the argument as PrefixDecodeWrapper does, and where the device is
        neither a Hopper GPU nor a CPU or its kernel is not made for such heads.
        """
        heads = HeadConfig(num_qo_heads, num_kv_heads, head_dim)
        super().__init__(heads, page_size, device, dtype, sm_scale, logits_soft_cap)
        self._use(*row_tiles(heads, dtype, self.device, page_size))
        self._num_queries = 0
        self._seq_lens = torch.empty(0, dtype=torch.int32)

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
        query_lens        [B] how many of each request's newest tokens attend, None: one each

        Raises ValueError naming argument and row, as PrefixDecodeWrapper.plan; a path may hold no
        token that attends.
        """
        lengths = checks.lengths(seq_lens)
        lens = checks.query_lens(query_lens, lengths)
        table = checks.path_table(paths, lengths)
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
        they equal. Raises ValueError naming argument and row.
        """
        lengths = checks.lengths(seq_lens)
        lens = checks.query_lens(query_lens, lengths)
        checks.block_table(block_table, lengths, self.page_size)
        pages = block_table.cpu().numpy()
        before = bt.shared_paths(pages, lengths - lens + 1, self.page_size)
        slots = bt.token_slots(block_table, self.page_size)
        rows = torch.arange(lengths.size, device=self.device)
        self._load(replace(before, seq_lens=lengths), lens, "block_table", slots, rows)

    def run(
        self,
        q: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Lse]:
        """Attend in one layer: q [Q, Hq, D], kv_cache = (k, v), each [slots, Hkv, D].

        Q is the sum of query_lens; rows stand in the order of the requests, and of a request in
        that of its tokens. Returns out [Q, Hq, D] (the given one, if given) and, with return_lse,
        an Lse [Q, Hq]. Raises ValueError naming the argument for shapes, dtypes or devices that do
        not fit the plan, RuntimeError before plan().
        """
        self._planned()
        return self._run_layer(q, kv_cache, out, return_lse, self._num_queries)

    def _load(
        self,
        table: PathTable,
        lens: np.ndarray,
        name: str,
        req_to_token: torch.Tensor,
        pool: torch.Tensor,
    ) -> None:
        self._load_step(build_forest(table, lens), name, req_to_token, pool)
        self._seq_lens = torch.from_numpy(table.seq_lens)
        self._num_queries = int(lens.sum())
