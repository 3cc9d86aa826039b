"""FlashInfer's kernels: `flashinfer`, `batchattn` and `cascade`.

`flashinfer` is the decode wrapper, made and planned as SGLang's backend does, `batchattn` the
persistent BatchAttention, `cascade` MultiLevelCascadeAttentionWrapper with a level for each of the
tree.
"""

from __future__ import annotations

import numpy as np
import torch

from eval.bench_kernel.case import Case
from sgl_prefix_attn.tools.calibrate import stock_decode

_DECODE_WORKSPACE_BYTES = 2 << 30
_FLOAT_WORKSPACE_BYTES = 256 << 20
_INT_WORKSPACE_BYTES = 8 << 20


class FlashInferDecodeRunnable:
    def __init__(self, case: Case):
        self._case, self._out = case, case.new_out()
        self._decode = stock_decode.FlashInferDecode(case.stock_batch, _DECODE_WORKSPACE_BYTES)
        self.plan = self._decode.plan

    def run(self, layer: int) -> torch.Tensor:
        case = self._case
        return self._decode.run(case.q, case.kv(layer), self._out[layer])


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
            self._qo_indptr, self._kv_indptr, self._indices, case.seq_lens, *case.head_sizes,
            case.heads.head_dim, case.page_size, causal=False, q_data_type=case.dtype,
            kv_data_type=case.kv_dtype,
        )  # fmt: skip

    def run(self, layer: int) -> torch.Tensor:
        case = self._case
        return self._wrapper.run(case.q, case.kv(layer), out=self._out[layer])[0]


class FlashInferCascadeRunnable:
    def __init__(self, case: Case):
        import flashinfer

        self._case = case
        levels = len(case.tree.counts)
        device = case.device

        def workspace(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.uint8, device=device)

        self._wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
            levels, workspace(_FLOAT_WORKSPACE_BYTES), "NHD"
        )
        # The default int workspaces are too small for 1024 requests; float ones must not be shared
        # when levels run split.
        for level_wrapper in self._wrapper._batch_prefill_wrappers:
            level_wrapper.reset_workspace_buffer(
                workspace(_FLOAT_WORKSPACE_BYTES), workspace(_INT_WORKSPACE_BYTES)
            )
        self._tables = [_level_tables(case, level) for level in range(levels)]
        self.plan()

    def plan(self) -> None:
        case = self._case
        qo_indptr, kv_indptr, kv_indices, last_len = map(list, zip(*self._tables, strict=True))
        self._wrapper.plan(
            qo_indptr, kv_indptr, kv_indices, last_len, *case.head_sizes, case.page_size,
            q_data_type=case.dtype, kv_data_type=case.kv_dtype,
        )  # fmt: skip

    def run(self, layer: int) -> torch.Tensor:
        case = self._case
        return self._wrapper.run(case.q, case.kv(layer))


def _level_tables(case: Case, level: int) -> tuple[torch.Tensor, ...]:
    """Return qo_indptr, kv_indptr, kv_indices and last page lengths (int32, on the device)."""
    count = case.tree.counts[level]
    pages = case.pages(case.node_slots[level])
    # Requests below a node are consecutive: offsets are where the node changes.
    nodes = case.tree.node_of_request()[level]
    qo_indptr = np.searchsorted(nodes, np.arange(count + 1)).astype(np.int32)
    kv_indptr = np.arange(count + 1, dtype=np.int32) * pages.shape[1]
    last_len = np.full(count, case.last_page_len(case.tree.lengths[level]), dtype=np.int32)
    on_device = [torch.from_numpy(x).to(case.device) for x in (qo_indptr, kv_indptr, last_len)]
    return on_device[0], on_device[1], pages.view(-1), on_device[2]
