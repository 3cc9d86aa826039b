"""Alternating measurements on engines that are up at the same time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from eval.bench_engine.workloads import Workload
from eval.engine_process import EngineProcess


@dataclass
class Samples:
    """Seconds for the short and the long generation, one of each an alternation."""

    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)


def tpot_ms(samples: Samples, new_tokens: tuple[int, int]) -> float:
    """(median long - median short) / tokens between them: intake and prefill cancel out."""
    seconds = statistics.median(samples.long) - statistics.median(samples.short)
    return seconds / (new_tokens[1] - new_tokens[0]) * 1e3


def each_tpot_ms(samples: Samples, new_tokens: tuple[int, int]) -> list[float]:
    """TPOT of every alternation on its own: the spread."""
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
    """Each backend in turn, `alternations` times; all prompts are in its radix cache before."""
    prompts = workload.prompts(vocab_size)
    for backend, engine in engines.items():
        progress(f"{workload.name}: filling the cache of {backend}")
        if workload.shared:
            engine.ask("time_batch", ids=prompts[:1], new_tokens=1)
        for _ in range(2):  # the second finds every prompt in the tree, as all later ones do
            engine.ask("time_batch", ids=prompts, new_tokens=8)
    samples = {backend: Samples() for backend in engines}
    order = list(engines)
    for i in range(alternations):
        # Every other round backwards, so that no backend always comes after the same one.
        for backend in order if i % 2 == 0 else order[::-1]:
            for count, kept in (
                (new_tokens[0], samples[backend].short),
                (new_tokens[1], samples[backend].long),
            ):
                answer = engines[backend].ask("time_batch", ids=prompts, new_tokens=count)
                kept.append(answer["seconds"])
    return samples
