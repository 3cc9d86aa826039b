"""Prefill attention that SGLang would run on several tokens a request: `flashinfer:fa2`,
`flashinfer:fa3` and `fa3`; rows have the time that the policy predicts of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.fa3 import FlashAttention3Runnable
from eval.bench_kernel.providers.planned import Server
from eval.bench_kernel.providers.provider import Provider
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.predict.prefill_time import PrefillTime

_WORKSPACE_BYTES = 2 << 30


class Stock(Provider):
    def prepare(self, case: Case):
        made = super().prepare(case)
        lens = np.full(case.batch_size, case.tokens, np.int32)
        unique = build_forest(case.paths, lens).unique_tokens
        time = PrefillTime(case.heads).stock(case.paths.seq_lens, unique, lens)
        made.facts = {"predicted_us": time}
        return made


class FlashInferRunnable:
    """FlashInfer's paged prefill wrapper, planned as for an eager step."""

    def __init__(self, backend: str, case: Case):
        import flashinfer

        self._case, self._outs = case, case.new_out()
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=case.device),
            "NHD",
            backend=backend,
        )
        self._pages = case.pages(case.req_to_token)
        self.plan()

    def plan(self) -> None:
        case, (batch, width) = self._case, self._pages.shape
        starts = torch.arange(batch + 1, dtype=torch.int32)
        self._wrapper.plan(
            starts * case.tokens, starts * width, self._pages.view(-1),
            torch.full((batch,), case.last_page_len(case.longest), dtype=torch.int32),
            *case.head_sizes, case.page_size, causal=True, sm_scale=case.sm_scale,
            q_data_type=case.dtype, kv_data_type=case.dtype,
        )  # fmt: skip

    def run(self, layer: int) -> torch.Tensor:
        return self._wrapper.run(self._case.q, self._case.kv(layer), out=self._outs[layer])


def _flashinfer(backend: str) -> Callable[[], Provider]:
    runnable = partial(FlashInferRunnable, backend)
    return partial(Stock, f"flashinfer:{backend}", "flashinfer", runnable)


PROVIDERS: dict[str, Callable[[], Provider]] = {
    "prefix": Server, "flashinfer:fa2": _flashinfer("fa2"), "flashinfer:fa3": _flashinfer("fa3"),
    "fa3": partial(Stock, "fa3", "sgl_kernel.flash_attn", FlashAttention3Runnable),
}  # fmt: skip
