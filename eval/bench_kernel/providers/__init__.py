"""Providers of eval.bench_kernel by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from eval.bench_kernel.providers import flashinfer
from eval.bench_kernel.providers.fa3 import FlashAttention3, flash_attention3
from eval.bench_kernel.providers.fasttree import FastTree
from eval.bench_kernel.providers.other_cuts import CUTS, merged
from eval.bench_kernel.providers.pat import Pat
from eval.bench_kernel.providers.planned import Server
from eval.bench_kernel.providers.provider import Provider, pick
from sgl_prefix_attn.engine.determinism import PART_TOKENS
from sgl_prefix_attn.execute.backends.family import HOPPER, PORTABLE
from sgl_prefix_attn.settings import Settings

HALFWAY = Settings().headroom // 2  # steps, of those that a server's plan lasts
STRATEGIES = ("pat", "naive", "query", "compute")  # of this library's planner, for ablations


def make_providers(
    names: Sequence[str], fasttree_path: str | None = None, pat_path: str | None = None
) -> list[Provider]:
    """Make providers in the given order. Raises ValueError for a name that does not exist.

    `prefix` runs what a server would, `prefix:KERNELS` one family of kernels, `prefix:STRATEGY` the
    portable kernel by another strategy, `prefix:merged` with no node split off, `prefix:CUT` a plan
    that the planner would not choose, `prefix:invariant` the aligned one of a deterministic server,
    beside which `fa3:one_split` is what SGLang runs, and `prefix:grown` a plan that was made half
    its life ago.
    """
    prefix = {
        **{name: {"kernels": name} for name in (HOPPER, PORTABLE)},
        **{name: {"kernels": PORTABLE, "strategy": name} for name in STRATEGIES},
        "merged": {"kernels": PORTABLE, "choose": merged},
        **{name: {"choose": cut} for name, cut in CUTS.items()},
        "invariant": {"part_tokens": PART_TOKENS},
        "grown": {"grown": HALFWAY},
    }
    one_split = partial(flash_attention3, num_splits=1)
    known = {
        "prefix": Server,
        **{f"prefix:{x}": partial(Server, f"prefix:{x}", **more) for x, more in prefix.items()},
        "fa3": FlashAttention3,
        "fa3:one_split": partial(FlashAttention3, "fa3:one_split", one_split),
        **{
            name: partial(Provider, name, "flashinfer", runnable)
            for name, runnable in flashinfer.RUNNABLES.items()
        },
        "fasttree": partial(FastTree, fasttree_path),
        "pat": partial(Pat, pat_path),
    }
    return pick(names, known)
