"""The decode of SGLang's backends as it runs them: what plans are measured beside."""

from dataclasses import dataclass
from typing import Any

import torch

from sgl_prefix_attn.predict.stock_time import on_tensor_cores
from sgl_prefix_attn.records import FA3, FLASHINFER, HeadConfig


def tensor_cores(heads: HeadConfig, kv_dtype: torch.dtype) -> bool:
    """Say whether SGLang lets FlashInfer decode with tensor cores, as should_use_tensor_core of
    0.5.17 to 0.5.23 does."""
    known = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    return on_tensor_cores(heads, kv_dtype.itemsize) and kv_dtype in known


@dataclass(frozen=True)
class StockBatch:
    """A decode batch as a backend of SGLang's gets it.

    dtype     of queries
    kv_dtype  of the KV cache
    seq_lens  int [B], on the host
    pages     int32 [B, longest], on the device; what is behind a request's last page is not read
    """

    heads: HeadConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    seq_lens: torch.Tensor
    pages: torch.Tensor

    @property
    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths int32 [B], and where each request's query begins, int32 [B + 1]."""
        lens = self.seq_lens.to(self.pages.device, torch.int32)
        return lens, torch.arange(len(lens) + 1, dtype=torch.int32, device=lens.device)


class FlashInferDecode:
    """FlashInfer's decode wrapper, made for CUDA graphs and planned for one batch;
    workspace_bytes: as many as SGLang gives it."""

    module = "flashinfer"
    page_size = 1  # SGLang gives it pages of one token, whatever the server's are

    def __init__(self, batch: StockBatch, workspace_bytes: int = 512 << 20):
        import flashinfer

        heads, seq_lens, pages, page_size = (
            batch.heads, batch.seq_lens, batch.pages, batch.page_size,
        )  # fmt: skip
        device = pages.device
        # indptr and last page lengths on the host, where plan() needs them: no synchronisation.
        num_pages = (seq_lens + page_size - 1) // page_size
        indptr = torch.zeros(len(seq_lens) + 1, dtype=torch.int32)
        indptr[1:] = num_pages.cumsum(0)
        last = ((seq_lens - 1) % page_size + 1).to(torch.int32)
        columns = torch.arange(pages.shape[1], device=device)
        indices = pages[columns < num_pages.to(device)[:, None]]
        self._wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(workspace_bytes, dtype=torch.uint8, device=device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores(heads, batch.kv_dtype),
            paged_kv_indptr_buffer=indptr.to(device),
            paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.to(device),
        )
        shape = heads.num_qo_heads, heads.num_kv_heads, heads.head_dim
        self._planned = (indptr, indices, last, *shape, page_size)
        self._dtypes = {"q_data_type": batch.dtype, "kv_data_type": batch.kv_dtype}
        self.plan()

    def plan(self) -> None:
        """Plan the batch, as in every step."""
        self._wrapper.plan(*self._planned, **self._dtypes)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor):
        """Attend in one layer: q and out [B, Hq, D], kv each [pages, page_size, Hkv, D]."""
        return self._wrapper.run(q, kv, out=out)


class FlashAttention3Decode:
    """SGLang's build of FlashAttention 3 with the schedule that its backend makes once a step; in a
    graph every layer reads that. num_splits: of each request's KV, 0: as FlashAttention 3 sees fit.

    SGLang captures with a page table as wide as the model's context; here it is as wide as the
    longest request, by which splits are bounded.
    """

    module = "sgl_kernel.flash_attn"
    page_size = None

    def __init__(self, batch: StockBatch, num_splits: int = 0):
        from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

        heads, (lens, starts) = batch.heads, batch.on_device
        self._attend, self._schedule = flash_attn_with_kvcache, get_scheduler_metadata
        self._kv_dtype, self._sm_scale = batch.kv_dtype, heads.head_dim**-0.5
        self._step = {
            "cache_seqlens": lens, "cu_seqlens_q": starts, "max_seqlen_q": 1, "causal": True,
            "num_splits": num_splits,
        }  # fmt: skip
        self._scheduled = {
            "batch_size": len(lens), "max_seqlen_k": int(batch.seq_lens.max()),
            "num_heads": heads.num_qo_heads, "num_heads_k": heads.num_kv_heads,
            "headdim": heads.head_dim, "qkv_dtype": self._kv_dtype, "page_size": batch.page_size,
            "has_softcap": False,
        }  # fmt: skip
        self._pages = batch.pages
        self._metadata = self._schedule(**self._step, **self._scheduled)

    def plan(self) -> None:
        """Schedule the batch, as in every step."""
        self._metadata.copy_(self._schedule(**self._step, **self._scheduled))

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out=None):
        """Attend in one layer as FlashInferDecode does, into a new tensor. Queries are rounded
        to the cache's dtype, as SGLang does."""
        return self._attend(
            q=q.to(self._kv_dtype), k_cache=kv[0], v_cache=kv[1], page_table=self._pages,
            softmax_scale=self._sm_scale, scheduler_metadata=self._metadata, **self._step,
        )  # fmt: skip


class FlashAttention3LatentDecode:
    """The same over latent KV, whose calls schedule themselves in SGLang."""

    module = "sgl_kernel.flash_attn"
    page_size = None

    def __init__(self, batch: StockBatch):
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        self._attend, self._dim = flash_attn_with_kvcache, batch.heads.value_dim
        lens, starts = batch.on_device
        of_kv = torch.zeros_like(starts)
        of_kv[1:] = lens.cumsum(0)
        self._step = {
            "page_table": batch.pages, "cache_seqlens": lens, "cu_seqlens_q": starts,
            "cu_seqlens_k_new": of_kv, "max_seqlen_q": 1,
            "softmax_scale": batch.heads.head_dim**-0.5, "causal": True, "num_splits": 0,
        }  # fmt: skip

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out=None):
        """Attend in one layer, into a new tensor [B, Hq, Dv]: q [B, Hq, D], kv rows [pages,
        page_size, 1, D] and their first Dv elements."""
        rows, values = kv
        return self._attend(
            q=q[..., self._dim :], qv=q[..., : self._dim], k_cache=rows[..., self._dim :],
            v_cache=values, **self._step,
        )  # fmt: skip


# By SGLang's names of the backends: those whose times can be measured, and over latent KV.
DECODES: dict[str, Any] = {FLASHINFER: FlashInferDecode, FA3: FlashAttention3Decode}
LATENT_DECODES: dict[str, Any] = {FA3: FlashAttention3LatentDecode}


def decodes(heads: HeadConfig) -> dict[str, Any]:
    """Return the decodes of such heads that can be measured."""
    return LATENT_DECODES if heads.latent_dim else DECODES
