"""SGLang's FlashAttention-3 build, called as SGLang 0.5.17's backend does: `fa3`, and
`fa3:one_split` as it does for deterministic inference.

For decode its scheduler metadata is computed once per step, into memory that the captured graph
reads, and passed to every layer's call; with several tokens a request each call schedules itself.
"""

from __future__ import annotations

from functools import partial

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Provider, Runnable
from sgl_prefix_attn.tools.calibrate import stock_decode


def flash_attention3(case: Case, num_splits: int = 0) -> Runnable:
    """A KV cache of float8_e4m3fn takes queries of it: each call rounds them, as SGLang does.

    num_splits: of each request's KV, 0: as FA3 sees fit
    """
    batch = case.stock_batch
    if case.tokens == 1:
        decode = stock_decode.FlashAttention3Decode(batch, num_splits)

        def plan() -> None:
            """Prepare a step as SGLang does: the page table and the schedule, in place."""
            batch.pages.copy_(case.page_table)
            decode.plan()

        return Runnable(lambda layer: decode.run(case.q, case.kv(layer)), plan)
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    attend = partial(
        flash_attn_with_kvcache, page_table=batch.pages, cache_seqlens=case.seq_lens,
        cu_seqlens_q=case.starts * case.tokens, max_seqlen_q=case.tokens,
        cu_seqlens_k_new=case.starts * case.longest, softmax_scale=case.sm_scale, causal=True,
        num_splits=num_splits,
    )  # fmt: skip

    def run(layer: int) -> torch.Tensor:
        k, v = case.kv(layer)
        return attend(q=case.q.to(case.kv_dtype), k_cache=k, v_cache=v)

    return Runnable(run, lambda: batch.pages.copy_(case.page_table))


class FlashAttention3(Provider):
    narrows = True

    def __init__(self, name: str = "fa3", runnable=flash_attention3):
        super().__init__(name, "sgl_kernel.flash_attn", runnable)

    def available(self) -> str | None:
        reason = super().available()
        if reason is None and torch.cuda.get_device_capability()[0] != 9:
            return "needs a Hopper GPU"
        return reason
