"""Providers by name. `make_providers` is the only place that knows all of them."""

from __future__ import annotations

from eval.bench_kernel.providers.base import Provider
from eval.bench_kernel.providers.fa3 import FlashAttention3
from eval.bench_kernel.providers.fasttree import FastTree
from eval.bench_kernel.providers.flashinfer_batch import FlashInferBatch
from eval.bench_kernel.providers.flashinfer_cascade import FlashInferCascade
from eval.bench_kernel.providers.flashinfer_decode import FlashInferDecode
from eval.bench_kernel.providers.pat import Pat
from eval.bench_kernel.providers.plain_torch import PlainTorch
from eval.bench_kernel.providers.prefix import Prefix

NAMES = ("prefix", "flashinfer", "fa3", "batchattn", "cascade", "fasttree", "pat", "torch")
STOCK = ("flashinfer", "fa3", "batchattn", "cascade")
STRATEGIES = ("calibrated", "pat", "naive", "query", "compute")


def make_providers(
    names: list[str],
    strategies: list[str],
    fasttree_path: str | None = None,
    pat_path: str | None = None,
) -> list[Provider]:
    """Providers in the given order; `prefix` stands for one of each strategy, `prefix:STRATEGY`
    for that one.

    Raises ValueError for a name or a strategy that does not exist.
    """
    make = {
        "flashinfer": FlashInferDecode,
        "fa3": FlashAttention3,
        "batchattn": FlashInferBatch,
        "cascade": FlashInferCascade,
        "fasttree": lambda: FastTree(fasttree_path),
        "pat": lambda: Pat(pat_path),
        "torch": PlainTorch,
    }
    providers: list[Provider] = []
    for name in names:
        base, _, strategy = name.partition(":")
        if base == "prefix":
            providers += [Prefix(_strategy(s)) for s in ([strategy] if strategy else strategies)]
        elif name in make:
            providers.append(make[name]())
        else:
            raise ValueError(f"provider {name!r}: known are {', '.join(NAMES)}, prefix:STRATEGY")
    return providers


def _strategy(name: str) -> str:
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r}: known are {', '.join(STRATEGIES)}")
    return name
