"""Request sets of the comparison; `scale` divides the lengths for a small model.

All requests of a set run together.
"""

from __future__ import annotations

import random
from argparse import ArgumentTypeError
from collections.abc import Callable

Prompts = list[list[int]]
Tokens = Callable[[int], list[int]]  # makes so many; two calls never give the same


def shared(tokens: Tokens) -> Prompts:
    """64 x (2048 shared + 128 private)."""
    prefix = tokens(2048)
    return [prefix + tokens(128) for _ in range(64)]


def three_levels(tokens: Tokens) -> Prompts:
    """One root, four children, sixteen grandchildren, three requests below each."""
    root = tokens(1024)
    children = [root + tokens(512) for _ in range(4)]
    grandchildren = [child + tokens(256) for child in children for _ in range(4)]
    return [node + tokens(40 + 16 * i) for node in grandchildren for i in range(3)]


def padding(tokens: Tokens) -> Prompts:
    """13 requests, padded to a captured batch size."""
    prefix = tokens(512)
    return [prefix + tokens(32) for _ in range(13)]


SCENARIOS: dict[str, Callable[[Tokens], Prompts]] = {
    f.__name__: f for f in (shared, three_levels, padding)
}


def known(name: str) -> str:
    """Return the name of a set. Raises ArgumentTypeError for another."""
    if name not in SCENARIOS:
        raise ArgumentTypeError(f"scenario {name!r}: known are {', '.join(SCENARIOS)}")
    return name


def build(name: str, vocab_size: int, new_tokens: int, scale: int) -> list[dict]:
    """Return requests (see engine_worker), the same whenever called."""
    rng, ids = random.Random(name), range(vocab_size // 8, vocab_size)
    prompts = SCENARIOS[name](lambda n: [rng.choice(ids) for _ in range(max(1, n // scale))])
    return [{"ids": prompt, "new_tokens": new_tokens} for prompt in prompts]
