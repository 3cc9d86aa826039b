"""Loads by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eval.workloads import grouped, traced, trees
from eval.workloads.load import Load, Scale

_OTHERS: dict[str, Callable[[Scale, Choice], Load]] = {
    "selfconsistency": lambda scale, choice: trees.self_consistency(scale),
    "tree": lambda scale, choice: trees.tree_search(scale),
    "conversation": lambda scale, choice: traced.conversation(scale, choice.seed, choice.azure),
    "agent": lambda scale, choice: traced.agent(scale, choice.seed),
    "mooncake": lambda scale, choice: traced.mooncake(scale, choice.mooncake, choice.longest),
}
NAMES = (*grouped.NAMED, *_OTHERS)
SPELLING = "GROUPSxPROMPTS:SHARED+PRIVATE:OUTPUT"


@dataclass(frozen=True)
class Choice:
    """What loads are made with.

    longest          tokens, prompt and output, that a request of a trace may have
    azure, mooncake  traces: the first is optional for `conversation`, `mooncake` needs the second
    """

    seed: int
    longest: int
    scale: Scale = Scale()
    azure: Path | None = None
    mooncake: Path | None = None


def build(name: str, choice: Choice) -> Load:
    """Make a load of a name or of groups spelled out. Raises ValueError quoting a bad name, for a
    trace that is missing or none, and for requests that are too long; OSError."""
    load = _build(name, choice)
    most = max(request.input + request.output for request in load.requests)
    if most > choice.longest:
        raise ValueError(
            f"load {name!r} has a request of {most} tokens; at most {choice.longest} fit the model"
        )
    return load


def _build(name: str, choice: Choice) -> Load:
    scale = choice.scale
    groups = grouped.NAMED.get(name) or grouped.parse(name)
    if groups is not None:
        return grouped.load(name, groups.scaled(scale), choice.seed)
    if name not in _OTHERS:
        raise ValueError(f"load {name!r}: known are {', '.join(NAMES)} and {SPELLING}")
    return _OTHERS[name](scale, choice)
