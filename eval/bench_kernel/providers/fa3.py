"""SGLang's FlashAttention-3 build, called as SGLang 0.5.17's backend does: `fa3`, and
`fa3:one_split` as it does for deterministic inference.

For decode its scheduler metadata is computed once per step, into memory that the captured graph
reads, and passed to every layer's call; with several tokens a request each call schedules itself.
"""

from __future__ import annotations

from functools import partial

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Provider
from sgl_prefix_attn.tools.calibrate import stock_decode


class FlashAttention3Runnable:
    """A KV cache of float8_e4m3fn takes queries of it: each call rounds them, as SGLang does.

    num_splits: of each request's KV, 0: as FA3 sees fit
    """

    def __init__(self, case: Case, num_splits: int = 0):
        batch = case.stock_batch
        self._case, self._page_table = case, batch.pages
        self._decode = self._extend = None
        if case.tokens == 1:
            self._decode = stock_decode.FlashAttention3Decode(batch, num_splits)
            return
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        starts = torch.arange(case.batch_size + 1, dtype=torch.int32, device=case.device)
        self._extend = partial(
            flash_attn_with_kvcache, page_table=self._page_table, cache_seqlens=case.seq_lens,
            cu_seqlens_q=starts * case.tokens, max_seqlen_q=case.tokens,
            cu_seqlens_k_new=starts * case.longest, softmax_scale=case.sm_scale, causal=True,
            num_splits=num_splits,
        )  # fmt: skip

    def plan(self) -> None:
        """Prepare a step as SGLang does: the page table and the scheduler metadata, in place."""
        self._page_table.copy_(self._case.pages(self._case.req_to_token))
        if self._decode is not None:
            self._decode.plan()

    def run(self, layer: int) -> torch.Tensor:
        case, (k, v) = self._case, self._case.kv(layer)
        if self._decode is not None:
            return self._decode.run(case.q, (k, v))
        return self._extend(q=case.q.to(case.kv_dtype), k_cache=k, v_cache=v)


class FlashAttention3(Provider):
    narrows = True

    def __init__(self, name: str = "fa3", runnable=FlashAttention3Runnable):
        super().__init__(name, "sgl_kernel.flash_attn", runnable)

    def available(self) -> str | None:
        reason = super().available()
        if reason is None and torch.cuda.get_device_capability()[0] != 9:
            return "needs a Hopper GPU"
        return reason
