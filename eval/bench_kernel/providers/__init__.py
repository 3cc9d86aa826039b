"""Providers by name. `make_providers` is the only place that knows all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from eval.bench_kernel.providers.fa3 import FlashAttention3, FlashAttention3Runnable
from eval.bench_kernel.providers.fasttree import FastTree
from eval.bench_kernel.providers.flashinfer import (
    FlashInferBatchRunnable,
    FlashInferCascadeRunnable,
    FlashInferDecodeRunnable,
)
from eval.bench_kernel.providers.other_cuts import CUTS, OtherCut, merged
from eval.bench_kernel.providers.pat import Pat
from eval.bench_kernel.providers.planned import Server
from eval.bench_kernel.providers.provider import Provider
from sgl_prefix_attn.engine.determinism import PART_TOKENS
from sgl_prefix_attn.execute.backends.family import HOPPER, PORTABLE

STRATEGIES = ("pat", "naive", "query", "compute")  # of this library's planner, for ablations


def make_providers(
    names: Sequence[str], fasttree_path: str | None = None, pat_path: str | None = None
) -> list[Provider]:
    """Make providers in the given order; `prefix` runs what a server would,
    `prefix:KERNELS` one family of kernels, `prefix:STRATEGY` the portable kernel by another
    strategy, `prefix:merged` with no node split off, `prefix:CUT` a plan that the planner would
    not choose, `prefix:invariant` the aligned one of a deterministic server, beside which
    `fa3:one_split` is what SGLang runs.

    Raises ValueError for a name that does not exist.
    """

    def prefix(name: str, **options: Any) -> partial:
        return partial(Server, f"prefix:{name}", **options)

    def flashinfer(name: str, runnable: type) -> partial:
        return partial(Provider, name, "flashinfer", runnable)

    one_split = partial(FlashAttention3Runnable, num_splits=1)
    make = {
        "prefix": Server,
        **{f"prefix:{name}": prefix(name, kernels=name) for name in (HOPPER, PORTABLE)},
        **{f"prefix:{s}": prefix(s, kernels=PORTABLE, strategy=s) for s in STRATEGIES},
        "prefix:merged": partial(OtherCut, "merged", merged, PORTABLE),
        **{f"prefix:{name}": partial(OtherCut, name, cut) for name, cut in CUTS.items()},
        "prefix:invariant": prefix("invariant", part_tokens=PART_TOKENS),
        "flashinfer": flashinfer("flashinfer", FlashInferDecodeRunnable),
        "fa3": FlashAttention3,
        "fa3:one_split": partial(FlashAttention3, "fa3:one_split", one_split),
        "batchattn": flashinfer("batchattn", FlashInferBatchRunnable),
        "cascade": flashinfer("cascade", FlashInferCascadeRunnable),
        "fasttree": partial(FastTree, fasttree_path),
        "pat": partial(Pat, pat_path),
    }
    for name in names:
        if name not in make:
            raise ValueError(f"provider {name!r}: known are {', '.join(make)}")
    return [make[name]() for name in names]
