"""Prefill attention that SGLang would run on several tokens a request: `flashinfer:fa2`,
`flashinfer:fa3` and `fa3`; rows have the time that the policy predicts of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.fa3 import flash_attention3
from eval.bench_kernel.providers.planned import Server
from eval.bench_kernel.providers.provider import Provider, Runnable
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.predict.prefill_time import PrefillTime

_WORKSPACE_BYTES = 2 << 30


class Stock(Provider):
    def prepare(self, case: Case) -> Runnable:
        made = super().prepare(case)
        lens = np.full(case.batch_size, case.tokens, np.int32)
        unique = build_forest(case.paths, lens).unique_tokens
        time = PrefillTime(case.heads).stock(case.paths.seq_lens, unique, lens)
        made.facts["predicted_us"] = time
        return made


def _flashinfer(case: Case, backend: str) -> Runnable:
    """FlashInfer's paged prefill wrapper, planned as for an eager step."""
    import flashinfer

    outs, pages = case.new_out(), case.page_table
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=case.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)

    def plan() -> None:
        batch, width = pages.shape
        starts = torch.arange(batch + 1, dtype=torch.int32)
        wrapper.plan(
            starts * case.tokens, starts * width, pages.view(-1),
            torch.full((batch,), case.last_page_len(case.longest), dtype=torch.int32),
            *case.head_sizes, case.page_size, causal=True, sm_scale=case.sm_scale,
            q_data_type=case.dtype, kv_data_type=case.dtype,
        )  # fmt: skip

    plan()
    return Runnable(lambda layer: wrapper.run(case.q, case.kv(layer), out=outs[layer]), plan)


PROVIDERS: dict[str, Callable[[], Provider]] = {
    "prefix": Server,
    **{
        f"flashinfer:{backend}": partial(
            Stock, f"flashinfer:{backend}", "flashinfer", partial(_flashinfer, backend=backend)
        )
        for backend in ("fa2", "fa3")
    },
    "fa3": partial(Stock, "fa3", "sgl_kernel.flash_attn", flash_attention3),
}
