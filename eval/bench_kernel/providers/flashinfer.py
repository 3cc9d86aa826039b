"""FlashInfer's kernels: `flashinfer`, `batchattn` and `cascade`.

`flashinfer` is the decode wrapper, made and planned as SGLang's backend does but with pages of the
case's size (SGLang's have one token), `batchattn` the persistent BatchAttention, `cascade`
MultiLevelCascadeAttentionWrapper with a level for each of the tree.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Runnable
from sgl_prefix_attn.tools.calibrate import stock_decode

_DECODE_WORKSPACE_BYTES = 2 << 30
_FLOAT_WORKSPACE_BYTES = 256 << 20
_INT_WORKSPACE_BYTES = 8 << 20


def flashinfer_decode(case: Case) -> Runnable:
    decode = stock_decode.FlashInferDecode(case.stock_batch, _DECODE_WORKSPACE_BYTES)
    outs = case.new_out()
    return Runnable(lambda layer: decode.run(case.q, case.kv(layer), outs[layer]), decode.plan)


def _batch_attention(case: Case) -> Runnable:
    import flashinfer

    pages, starts, outs = case.page_table, case.starts, case.new_out()
    wrapper = flashinfer.BatchAttention("NHD", str(case.device))
    plan = partial(
        wrapper.plan, starts, starts * pages.shape[1], pages.view(-1), case.seq_lens,
        *case.head_sizes, case.heads.head_dim, case.page_size, causal=False,
        q_data_type=case.dtype, kv_data_type=case.kv_dtype,
    )  # fmt: skip
    plan()
    return Runnable(lambda layer: wrapper.run(case.q, case.kv(layer), out=outs[layer])[0], plan)


def _cascade(case: Case) -> Runnable:
    import flashinfer

    levels = len(case.tree.counts)

    def workspace(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=case.device)

    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        levels, workspace(_FLOAT_WORKSPACE_BYTES), "NHD"
    )
    # The default int workspaces are too small for 1024 requests; float ones must not be shared
    # when levels run split.
    for level_wrapper in wrapper._batch_prefill_wrappers:
        level_wrapper.reset_workspace_buffer(
            workspace(_FLOAT_WORKSPACE_BYTES), workspace(_INT_WORKSPACE_BYTES)
        )
    tables = [_level_tables(case, level) for level in range(levels)]

    def plan() -> None:
        wrapper.plan(
            *map(list, zip(*tables, strict=True)), *case.head_sizes, case.page_size,
            q_data_type=case.dtype, kv_data_type=case.kv_dtype,
        )  # fmt: skip

    plan()
    return Runnable(lambda layer: wrapper.run(case.q, case.kv(layer)), plan)


def _level_tables(case: Case, level: int) -> tuple[torch.Tensor, ...]:
    """Return qo_indptr, kv_indptr, kv_indices and last page lengths (int32, on the device)."""
    count, pages = case.tree.counts[level], case.pages(case.node_slots(level))
    last_len = np.full(count, case.last_page_len(case.tree.lengths[level]))
    # Requests below a node are consecutive: offsets are where the node changes.
    offsets = case.tree.first_requests(level), np.arange(count + 1) * pages.shape[1], last_len
    qo_indptr, kv_indptr, last_len = (torch.from_numpy(x).int().to(case.device) for x in offsets)
    return qo_indptr, kv_indptr, pages.view(-1), last_len


RUNNABLES = {
    "flashinfer": flashinfer_decode, "batchattn": _batch_attention, "cascade": _cascade,
}  # fmt: skip
