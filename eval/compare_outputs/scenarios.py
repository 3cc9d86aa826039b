"""Request sets of the comparison; `scale` divides the lengths for a small model.

All requests of a set run together.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Prompts = list[list[int]]


class _Tokens:
    """Fresh token lists; two calls never give the same."""

    def __init__(self, name: str, vocab_size: int, scale: int):
        self._rng = random.Random(name)
        self._vocab_size, self._scale = vocab_size, scale

    def __call__(self, count: int) -> list[int]:
        length = max(1, count // self._scale)
        first = self._vocab_size // 8
        return [self._rng.randrange(first, self._vocab_size) for _ in range(length)]


def shared(tokens: _Tokens) -> Prompts:
    """64 x (2048 shared + 128 private)."""
    prefix = tokens(2048)
    return [prefix + tokens(128) for _ in range(64)]


def three_levels(tokens: _Tokens) -> Prompts:
    """One root, four children, sixteen grandchildren, three requests below each."""
    root = tokens(1024)
    children = [root + tokens(512) for _ in range(4)]
    grandchildren = [child + tokens(256) for child in children for _ in range(4)]
    return [node + tokens(40 + 16 * i) for node in grandchildren for i in range(3)]


def padding(tokens: _Tokens) -> Prompts:
    """13 requests, padded to a captured batch size."""
    prefix = tokens(512)
    return [prefix + tokens(32) for _ in range(13)]


SCENARIOS: dict[str, Callable[[_Tokens], Prompts]] = {
    f.__name__: f for f in (shared, three_levels, padding)
}


def build(name: str, vocab_size: int, new_tokens: int, scale: int) -> list[dict]:
    """Return requests (see engine_worker), the same whenever called."""
    prompts = SCENARIOS[name](_Tokens(name, vocab_size, scale))
    return [{"ids": ids, "new_tokens": new_tokens} for ids in prompts]
