"""What is known without a GPU: bytes, and the times on an H200 that they let expect."""

from __future__ import annotations

from eval.bench_kernel.floor import Rates
from sgl_prefix_attn.calibrate.batches import Batch
from sgl_prefix_attn.records import HeadConfig

ITEMSIZE = 2  # of bf16, and of the papers' fp16
# Bytes/s of a paged gather and operations/s on an H200, as in eval/results/ablate_h200.json.
H200 = Rates(4.2e12, 600e12, "nominal H200")
# Over the 20 trees of PAT, row tiles there are within 21 % of a fixed time and the larger of bytes
# and operations, these at the rate of `1,1024_2048,32` (34.9 GFLOP in 104 microseconds).
# FlashInfer's times on an H100 (eval/results/kernel_h100_pat20.json) are within 16 % of the same
# fixed time, 0.12 microseconds per request, and KV at the larger of its unique bytes from memory
# and all of its bytes from the L2 cache at 7.5 TB/s.
_FIXED_US, _ROW_TILE_FLOPS = 10.0, 370e12
_REQUEST_US, _L2_BANDWIDTH = 0.12, 7.5e12
# Of a Llama2-7B (32 layers of 32 KV heads of 128) and a Llama-3.1-8B (8 KV heads), per token.
LLAMA2_TOKEN_BYTES, LLAMA3_TOKEN_BYTES = 32 * 32 * 128 * 2 * 2, 32 * 8 * 128 * 2 * 2


def kv_bytes(tokens: int, heads: HeadConfig) -> int:
    """Count the bytes of K and V of so many tokens in one layer."""
    return tokens * heads.num_kv_heads * heads.head_dim * 2 * ITEMSIZE


def flops(batch: Batch, heads: HeadConfig) -> int:
    """Count the operations of QK and PV of a batch in one layer."""
    return batch.tokens * heads.num_qo_heads * heads.head_dim * 4


def floor_us(batch: Batch, heads: HeadConfig, rates: Rates) -> float:
    """Return the floor of eval/bench_kernel/floor.py, for lengths of any kind."""
    read = kv_bytes(batch.unique_tokens, heads) / rates.bandwidth
    return 1e6 * max(read, flops(batch, heads) / rates.flops)


def expected_us(provider: str, batch: Batch, heads: HeadConfig) -> float:
    """Return what bytes and operations let expect of a layer on an H200, in microseconds.

    All kernels read unique KV from memory, ours once; stock kernels read it from L2 again for
    every other request.
    """
    memory = kv_bytes(batch.unique_tokens, heads) / H200.bandwidth
    if provider == "prefix":
        return _FIXED_US + 1e6 * max(memory, flops(batch, heads) / _ROW_TILE_FLOPS)
    cached = kv_bytes(batch.tokens, heads) / _L2_BANDWIDTH
    return _FIXED_US + _REQUEST_US * batch.size + 1e6 * max(memory, cached)


def merge_bytes(num_partials: int, heads: HeadConfig) -> int:
    """Count the bytes of partial results of one layer: half-precision rows, log-sum-exp and scale
    of each query head. They are written once and read once."""
    return num_partials * heads.num_qo_heads * (2 * heads.head_dim + 8)


def peak_kv_bytes(prompt: int, shared: int, completion: int, batch: int, token_bytes: int) -> int:
    """Count the KV bytes of running requests halfway through their completions, over all layers;
    `shared` tokens of their prompts are held once."""
    return token_bytes * (shared + batch * (prompt - shared + completion // 2))
