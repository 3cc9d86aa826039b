"""What a load may gain at most: from bytes, operations and what a step takes besides attention.

Nothing here is fitted to a server under load. Requests run in waves of so many as may run at once;
a wave's prompts are prefilled, parts found in the cache not, then all of it decodes, half of each
answer being there on average. Decode attention reads KV at the GPU's bandwidth: stock kernels that
of every request, prefix kernels what is shared once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.workloads.load import Load, distinct_tokens

# Besides attention a decode step of the 8B shape takes 6.3 to 7.2 ms on an H100 and 4.5 to 5.3 ms
# on an H200, for 4 to 64 requests (TPOT less attention in engine_h100.json and engine_h200.json): a
# fixed time, the weights at the GPU's bandwidth, and a little for each request.
_STEP_S, _REQUEST_S = 1.0e-3, 11.5e-6
_WEIGHTS = 7.5e9
_BYTES = 2
_KV_TOKEN_BYTES = 2 * _BYTES * 32 * 8 * 128
_PREFILL_SHARE = 0.6  # of the dense rate


@dataclass(frozen=True)
class Gpu:
    """Bytes/s that a paged gather reaches, and dense bf16 operations/s of the data sheet."""

    bandwidth: float
    flops: float


GPUS = {"H100": Gpu(2.94e12, 989e12), "H200": Gpu(4.1e12, 989e12)}


@dataclass(frozen=True)
class Expected:
    """Ratios of prefix to stock kernels, all requests at once; kv: of KV bytes read."""

    tpot: float
    output_tokens_per_s: float
    kv: float


def expect(load: Load, gpu: Gpu, max_running: int) -> Expected:
    """Predict the ratios of a load for the shape llama3.1-8b."""
    requests = load.requests
    waves = [requests[i : i + max_running] for i in range(0, len(requests), max_running)]
    prefill = 2 * _WEIGHTS * distinct_tokens(requests) / (_PREFILL_SHARE * gpu.flops)
    # Per wave: decode steps, KV tokens of a step by either kind of kernels.
    steps = [sum(r.output for r in wave) / len(wave) for wave in waves]
    own = [sum(r.output / 2 for r in wave) for wave in waves]
    stock = [sum(r.input for r in wave) + tail for wave, tail in zip(waves, own, strict=True)]
    prefix = [distinct_tokens(wave) + tail for wave, tail in zip(waves, own, strict=True)]
    seconds = [
        [n * _step_s(len(wave), kv, gpu) for n, wave, kv in zip(steps, waves, tokens, strict=True)]
        for tokens in (stock, prefix)
    ]
    of_stock, of_prefix = map(sum, seconds)
    return Expected(
        tpot=of_prefix / of_stock,
        output_tokens_per_s=(prefill + of_stock) / (prefill + of_prefix),
        kv=_dot(steps, prefix) / _dot(steps, stock),
    )


def _step_s(batch: int, kv_tokens: float, gpu: Gpu) -> float:
    """Return seconds of a decode step that reads so many KV tokens."""
    read = _BYTES * _WEIGHTS + _KV_TOKEN_BYTES * kv_tokens
    return _STEP_S + _REQUEST_S * batch + read / gpu.bandwidth


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
