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
        # indptr and last page lengths on the host, where plan() needs them: no synchronisation.
        lengths = case.seq_lens.cpu()
        num_pages = (lengths + case.page_size - 1) // case.page_size
        self._indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        self._indptr[1:] = num_pages.cumsum(0)
        self._last_len = (lengths - 1) % case.page_size + 1
        columns = torch.arange(pages.shape[1], device=case.device)
        self._indices = pages[columns < num_pages.to(case.device)[:, None]]
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
