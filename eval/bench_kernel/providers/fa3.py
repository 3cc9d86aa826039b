"""SGLang's FlashAttention-3 build, called as SGLang 0.5.17's backend does for decode: `fa3`.

Its scheduler metadata is computed once per step, into memory that the captured graph reads, and
passed to every layer's call. One difference remains: SGLang captures with a page table as wide as
the model's context; here it is as wide as the longest request, and FA3 bounds its splits by it.
"""

from __future__ import annotations

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Provider


class FlashAttention3Runnable:
    def __init__(self, case: Case):
        from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

        self._attend = flash_attn_with_kvcache
        self._get_scheduler_metadata = get_scheduler_metadata
        self._case = case
        self._cu_seqlens = torch.arange(
            case.tree.batch_size + 1, dtype=torch.int32, device=case.device
        )
        self._page_table = self._pages()
        self._metadata = self._schedule()

    def plan(self) -> None:
        """Prepare a step as SGLang does: the page table and the scheduler metadata, in place."""
        self._page_table.copy_(self._pages())
        self._metadata.copy_(self._schedule())

    def _pages(self) -> torch.Tensor:
        return self._case.pages(self._case.req_to_token)

    def _schedule(self) -> torch.Tensor:
        """Compute, as int32, which tiles and KV splits FA3 runs; the same for every layer."""
        case = self._case
        return self._get_scheduler_metadata(
            batch_size=case.tree.batch_size,
            max_seqlen_q=1,
            max_seqlen_k=case.tree.seq_len,
            num_heads=case.heads.num_qo_heads,
            num_heads_k=case.heads.num_kv_heads,
            headdim=case.heads.head_dim,
            cache_seqlens=case.seq_lens,
            qkv_dtype=case.dtype,
            cu_seqlens_q=self._cu_seqlens,
            page_size=case.page_size,
            causal=True,
            has_softcap=False,
            num_splits=0,
        )

    def run(self, layer: int) -> torch.Tensor:
        case = self._case
        return self._attend(
            q=case.q,
            k_cache=case.paged(case.k[layer]),
            v_cache=case.paged(case.v[layer]),
            page_table=self._page_table,
            cache_seqlens=case.seq_lens,
            cu_seqlens_q=self._cu_seqlens,
            max_seqlen_q=1,
            softmax_scale=case.sm_scale,
            causal=True,
            num_splits=0,
            scheduler_metadata=self._metadata,
        )


class FlashAttention3(Provider):
    name = "fa3"
    module = "sgl_kernel.flash_attn"
    runnable = FlashAttention3Runnable

    def available(self) -> str | None:
        reason = super().available()
        if reason is None and torch.cuda.get_device_capability()[0] != 9:
            return "needs a Hopper GPU"
        return reason
