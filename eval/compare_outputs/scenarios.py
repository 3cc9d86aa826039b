"""Request sets of the comparison; `scale` divides the lengths for a small model."""

from __future__ import annotations

import random
from collections.abc import Callable

Request = dict  # ids, new_tokens, after (see eval.engine_worker)


class _Tokens:
    """Fresh token lists; two calls never give the same."""

    def __init__(self, name: str, vocab_size: int, scale: int):
        self._rng = random.Random(name)
        self._vocab_size, self._scale = vocab_size, scale

    def __call__(self, count: int) -> list[int]:
        length = max(1, count // self._scale)
        first = self._vocab_size // 8
        return [self._rng.randrange(first, self._vocab_size) for _ in range(length)]


def _requests(prompts: list[list[int]], new_tokens: int) -> list[Request]:
    """All at once, but after the first one's prefill: shared prefixes are in the tree then."""
    after = [None] + [[0, 1]] * (len(prompts) - 1)
    return [
        {"ids": ids, "new_tokens": new_tokens, "after": when}
        for ids, when in zip(prompts, after, strict=True)
    ]


def shared(tokens: _Tokens, new_tokens: int) -> list[Request]:
    """64 x (2048 shared + 128 private)."""
    prefix = tokens(2048)
    return _requests([prefix + tokens(128) for _ in range(64)], new_tokens)


def three_levels(tokens: _Tokens, new_tokens: int) -> list[Request]:
    """One root, four children, sixteen grandchildren, three requests below each."""
    root = tokens(1024)
    children = [root + tokens(512) for _ in range(4)]
    grandchildren = [child + tokens(256) for child in children for _ in range(4)]
    prompts = [node + tokens(40 + 16 * i) for node in grandchildren for i in range(3)]
    return _requests(prompts, new_tokens)


def forty_groups(tokens: _Tokens, new_tokens: int) -> list[Request]:
    """Forty prefixes that have nothing in common, two requests on each."""
    prompts = []
    for i in range(40):
        prefix = tokens(256 + 16 * i)
        prompts += [prefix + tokens(48), prefix + tokens(80)]
    return _requests(prompts, new_tokens)


def unshared(tokens: _Tokens, new_tokens: int) -> list[Request]:
    """32 prompts of different lengths without a common token."""
    return _requests([tokens(256 + 48 * i) for i in range(32)], new_tokens)


def join_leave(tokens: _Tokens, new_tokens: int) -> list[Request]:
    """A new request every three tokens of the first one, each leaving at its own time."""
    prefix = tokens(1024)
    requests = [{"ids": prefix + tokens(64), "new_tokens": 2 * new_tokens, "after": None}]
    for i in range(24):
        # Every third request branches off in the middle of the prefix: its node splits.
        start = prefix if i % 3 else prefix[: len(prefix) // 2]
        requests.append(
            {
                "ids": start + tokens(32 + 8 * i),
                "new_tokens": max(2, (i * 7) % new_tokens),
                "after": [0, 1 + 3 * i % (2 * new_tokens - 2)],
            }
        )
    return requests


def padding(tokens: _Tokens, new_tokens: int) -> list[Request]:
    """13 requests that finish one by one: batches of 13 down to 1, padded to captured sizes."""
    prefix = tokens(512)
    requests = _requests([prefix + tokens(32) for _ in range(13)], new_tokens)
    for i, request in enumerate(requests):
        request["new_tokens"] = max(4, new_tokens - 4 * i)
    return requests


SCENARIOS: dict[str, Callable[[_Tokens, int], list[Request]]] = {
    f.__name__: f for f in (shared, three_levels, forty_groups, unshared, join_leave, padding)
}


def build(name: str, vocab_size: int, new_tokens: int, scale: int) -> list[Request]:
    """The same requests whenever called. Raises ValueError for an unknown scenario."""
    if name not in SCENARIOS:
        raise ValueError(f"scenario {name!r}: known are {', '.join(SCENARIOS)}")
    return SCENARIOS[name](_Tokens(name, vocab_size, scale), new_tokens)
