"""FlashInfer's decode wrapper, made and planned as SGLang's backend does: `flashinfer`."""

from __future__ import annotations

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Provider
from sgl_prefix_attn.calibrate.measure import tensor_cores

_WORKSPACE_BYTES = 2 << 30


class FlashInferDecodeRunnable:
    def __init__(self, case: Case):
        import flashinfer

        self._case = case
        pages = case.pages(case.req_to_token)
        batch, pages_per_row = pages.shape
        # indptr and last page lengths on the host, where plan() needs them: no synchronisation.
        self._indptr = torch.arange(batch + 1, dtype=torch.int32) * pages_per_row
        self._last_len = torch.full(
            (batch,), case.last_page_len(case.tree.seq_len), dtype=torch.int32
        )
        self._indices = pages.view(-1)
        self._out = case.new_out()
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=case.device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores(case.heads, case.dtype),
            paged_kv_indptr_buffer=self._indptr.to(case.device),
            paged_kv_indices_buffer=self._indices.clone(),
            paged_kv_last_page_len_buffer=self._last_len.to(case.device),
        )
        self.plan()

    def plan(self) -> None:
        case = self._case
        self._wrapper.plan(
            self._indptr,
            self._indices,
            self._last_len,
            *case.head_sizes,
            case.page_size,
            q_data_type=case.dtype,
            kv_data_type=case.dtype,
        )

    def run(self, layer: int) -> torch.Tensor:
        case = self._case
        return self._wrapper.run(case.q, case.kv(layer), out=self._out[layer])


class FlashInferDecode(Provider):
    name = "flashinfer"
    module = "flashinfer"
    runnable = FlashInferDecodeRunnable
