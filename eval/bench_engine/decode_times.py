"""Alternating measurements on engines that are up at the same time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from eval.bench_engine.workloads import Workload
from eval.dummy_engine import in_turn
from eval.engine_process import EngineProcess

# KV pool over what the largest workload needs: outputs of earlier generations, slots of drafts.
_POOL_MARGIN = 1.4


@dataclass
class Samples:
    """Seconds for the short and the long generation, one of each per alternation."""

    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)


def pool_tokens(workloads: Sequence[Workload], new_tokens: Sequence[int]) -> int:
    """Return how many KV tokens an engine's pool needs."""
    most = max(workload.kv_tokens(new_tokens[1]) for workload in workloads)
    return int(_POOL_MARGIN * most) + 1024


def times_of(samples: Samples, base: Samples, new_tokens: Sequence[int]) -> dict:
    """Return a row's times: TPOT and its ratio to that of `base`, of each alternation, too.

    TPOT is (median long - median short) / tokens between: intake and prefill cancel out."""
    tokens = new_tokens[1] - new_tokens[0]
    own, stock = (
        (statistics.median(x.long) - statistics.median(x.short)) / tokens * 1e3
        for x in (samples, base)
    )
    each, base_each = (
        [(long - short) / tokens * 1e3 for short, long in zip(x.short, x.long, strict=True)]
        for x in (samples, base)
    )
    return {
        "alternations": len(samples.long), "tpot_ms": own, "ratio": own / stock,
        "baseline_tpot_ms": stock, "each_tpot_ms": each, "baseline_each_tpot_ms": base_each,
        "seconds_short": samples.short, "seconds_long": samples.long,
    }  # fmt: skip


def alternate(
    engines: dict[str, EngineProcess], workload: Workload, prompts: list[list[int]],
    new_tokens: Sequence[int], alternations: int,
) -> dict[str, Samples]:  # fmt: skip
    """Time each backend in turn, `alternations` times; all prompts are in its cache before."""
    for backend, engine in engines.items():
        print(f"{workload.name}: filling the cache of {backend}", flush=True)
        # By itself, so that layers of linear attention keep a state of just what is shared.
        if prefixes := workload.prefixes(prompts):
            engine.ask("time_batch", ids=prefixes, new_tokens=1)
        for _ in range(2):  # the second finds every prompt in the tree, as all later ones do
            engine.ask("time_batch", ids=prompts, new_tokens=8)
    samples = {backend: Samples() for backend in engines}
    for _, backend in in_turn(engines, alternations):
        kept = (samples[backend].short, samples[backend].long)
        for count, seconds in zip(new_tokens, kept, strict=True):
            answer = engines[backend].ask("time_batch", ids=prompts, new_tokens=count)
            seconds.append(answer["seconds"])
    return samples
