"""Providers by name. `make_providers` is the only place that knows all of them."""

from __future__ import annotations

from functools import partial

from eval.bench_kernel.providers.fa3 import FlashAttention3
from eval.bench_kernel.providers.fasttree import FastTree
from eval.bench_kernel.providers.flashinfer_batch import FlashInferBatch
from eval.bench_kernel.providers.flashinfer_cascade import FlashInferCascade
from eval.bench_kernel.providers.flashinfer_decode import FlashInferDecode
from eval.bench_kernel.providers.pat import Pat
from eval.bench_kernel.providers.plain_torch import PlainTorch
from eval.bench_kernel.providers.prefix import Prefix
from eval.bench_kernel.providers.provider import Provider
from sgl_prefix_attn.execute.backends.family import ROW_TILES, TRITON

STOCK = ("flashinfer", "fa3", "batchattn", "cascade")
STRATEGIES = ("calibrated", "pat", "naive", "query", "compute")  # of this library's planner


def make_providers(
    names: list[str], fasttree_path: str | None = None, pat_path: str | None = None
) -> list[Provider]:
    """Make providers in the given order; `prefix` runs what a server would,
    `prefix:STRATEGY` packs of another strategy, `prefix:KERNELS` one family of kernels.

    Raises ValueError for a name or a strategy that does not exist.
    """
    make = {
        "prefix": Prefix,
        **{f"prefix:{strategy}": partial(Prefix, strategy=strategy) for strategy in STRATEGIES},
        **{
            f"prefix:{kernels}": partial(Prefix, kernels=kernels) for kernels in (ROW_TILES, TRITON)
        },
        "flashinfer": FlashInferDecode,
        "fa3": FlashAttention3,
        "batchattn": FlashInferBatch,
        "cascade": FlashInferCascade,
        "fasttree": partial(FastTree, fasttree_path),
        "pat": partial(Pat, pat_path),
        "torch": PlainTorch,
    }
    for name in names:
        if name not in make:
            raise ValueError(f"provider {name!r}: known are {', '.join(make)}")
    return [make[name]() for name in names]
