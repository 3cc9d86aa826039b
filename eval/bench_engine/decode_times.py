"""Alternating measurements on engines that are up at the same time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from eval.bench_engine.workloads import Workload
from eval.dummy_engine import in_turn
from eval.engine_process import EngineProcess


@dataclass
class Samples:
    """Seconds for the short and the long generation, one of each per alternation."""

    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)


def tpot_ms(samples: Samples, new_tokens: tuple[int, int]) -> float:
    """Return (median long - median short) / tokens between: intake and prefill cancel out."""
    seconds = statistics.median(samples.long) - statistics.median(samples.short)
    return seconds / (new_tokens[1] - new_tokens[0]) * 1e3


def each_tpot_ms(samples: Samples, new_tokens: tuple[int, int]) -> list[float]:
    """Return TPOT of every alternation on its own: the spread."""
    tokens = new_tokens[1] - new_tokens[0]
    return [
        (long - short) / tokens * 1e3
        for short, long in zip(samples.short, samples.long, strict=True)
    ]


def alternate(
    engines: dict[str, EngineProcess],
    workload: Workload,
    vocab_size: int,
    new_tokens: tuple[int, int],
    alternations: int,
    progress: Callable[[str], None],
) -> dict[str, Samples]:
    """Time each backend in turn, `alternations` times; all prompts are in its cache before."""
    prompts = workload.prompts(vocab_size)
    for backend, engine in engines.items():
        progress(f"{workload.name}: filling the cache of {backend}")
        if workload.shared:
            engine.ask("time_batch", ids=prompts[:1], new_tokens=1)
        for _ in range(2):  # the second finds every prompt in the tree, as all later ones do
            engine.ask("time_batch", ids=prompts, new_tokens=8)
    samples = {backend: Samples() for backend in engines}
    for _, backend in in_turn(engines, alternations):
        for count, kept in zip(
            new_tokens, (samples[backend].short, samples[backend].long), strict=True
        ):
            answer = engines[backend].ask("time_batch", ids=prompts, new_tokens=count)
            kept.append(answer["seconds"])
    return samples
