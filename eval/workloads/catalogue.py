"""Loads by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eval.workloads import grouped, traced, trees
from eval.workloads.load import Load, Scale

_OTHERS: dict[str, Callable[[Choice], Load]] = {
    "selfconsistency": lambda its: trees.self_consistency(),
    "tree": lambda its: trees.tree_search(),
    "conversation": lambda its: traced.conversation(its.seed, its.azure),
    "agent": lambda its: traced.agent(its.seed),
    "mooncake": lambda its: traced.mooncake(its.mooncake, its.longest),
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
    groups = grouped.NAMED.get(name) or grouped.parse(name)
    if groups is not None:
        load = grouped.load(name, groups.scaled(choice.scale), choice.seed)
    elif name in _OTHERS:
        load = _OTHERS[name](choice).scaled(choice.scale)
    else:
        raise ValueError(f"load {name!r}: known are {', '.join(NAMES)} and {SPELLING}")
    most = max(request.input + request.output for request in load.requests)
    if most > choice.longest:
        raise ValueError(
            f"load {name!r} has a request of {most} tokens; at most {choice.longest} fit the model"
        )
    return load
