"""SGLang's FlashAttention-3 build, called as SGLang's backend does: `fa3`."""

from __future__ import annotations

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.base import BaseProvider


class FlashAttention3(BaseProvider):
    name = "fa3"
    module = "sgl_kernel.flash_attn"

    def available(self) -> str | None:
        reason = super().available()
        if reason is None and torch.cuda.get_device_capability()[0] != 9:
            return "needs a Hopper GPU"
        return reason

    def prepare(self, case: Case) -> FlashAttention3Runnable:
        return FlashAttention3Runnable(case)


class FlashAttention3Runnable:
    def __init__(self, case: Case):
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        self._attend = flash_attn_with_kvcache
        self._case = case
        self._cu_seqlens = torch.arange(
            case.tree.batch_size + 1, dtype=torch.int32, device=case.device
        )
        self.plan()

    def plan(self) -> None:
        """What SGLang prepares a step: the page table."""
        self._page_table = self._case.pages(self._case.req_to_token)

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
        )
