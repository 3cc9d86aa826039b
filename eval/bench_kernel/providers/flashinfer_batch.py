"""FlashInfer's persistent BatchAttention: `batchattn`."""

from __future__ import annotations

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Provider


class FlashInferBatchRunnable:
    def __init__(self, case: Case):
        import flashinfer

        self._case = case
        pages = case.pages(case.req_to_token)
        batch, pages_per_row = pages.shape
        self._qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=case.device)
        self._kv_indptr = self._qo_indptr * pages_per_row
        self._indices = pages.view(-1)
        self._out = case.new_out()
        self._wrapper = flashinfer.BatchAttention("NHD", str(case.device))
        self.plan()

    def plan(self) -> None:
        case = self._case
        self._wrapper.plan(
            self._qo_indptr,
            self._kv_indptr,
            self._indices,
            case.seq_lens,
            *case.head_sizes,
            case.heads.head_dim,
            case.page_size,
            causal=False,
            q_data_type=case.dtype,
            kv_data_type=case.dtype,
        )

    def run(self, layer: int) -> torch.Tensor:
        case = self._case
        return self._wrapper.run(case.q, case.kv(layer), out=self._out[layer])[0]


class FlashInferBatch(Provider):
    name = "batchattn"
    module = "flashinfer"
    runnable = FlashInferBatchRunnable
