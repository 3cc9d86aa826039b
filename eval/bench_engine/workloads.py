"""Request sets: groups of prompts with one shared part and private rests."""

from __future__ import annotations

import random
import re
from argparse import ArgumentTypeError
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """`groups` times `each` requests of `shared` common and `private` own prompt tokens, the last
    of them `most`, those between in even steps."""

    name: str
    each: int
    shared: int
    private: int
    groups: int = 1
    most: int | None = None

    @property
    def batch(self) -> int:
        return self.groups * self.each

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Draw the same tokens whenever called; other workloads share none of them."""
        rng = random.Random(self.name)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(vocab_size // 8, vocab_size) for _ in range(count)]

        prefixes = [tokens(self.shared) for _ in range(self.groups)]
        return [prefix + tokens(own) for prefix in prefixes for own in self._own_tokens()]

    def prefixes(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return what each group shares, of its prompts; nothing where that is no token."""
        return [ids[: self.shared] for ids in prompts[:: self.each] if self.shared]

    def facts(self) -> dict:
        """Return what a row says of it."""
        sizes = {"batch": self.batch, "shared": self.shared, "private": self.private}
        return {"workload": self.name} | sizes

    def kv_tokens(self, new_tokens: int) -> int:
        """Return how many KV tokens the pool must hold while all requests run."""
        own = sum(self._own_tokens()) + self.each * new_tokens
        return self.groups * (self.shared + own)

    def _own_tokens(self) -> list[int]:
        if self.most is None:
            return self.each * [self.private]
        if self.each == 1:
            return [self.most]
        step = (self.most - self.private) / (self.each - 1)
        return [round(self.private + i * step) for i in range(self.each)]


NAMED = {
    "shared8k": Workload("shared8k", 64, 8192, 256),
    "shared2k": Workload("shared2k", 64, 2048, 128),
    "unshared": Workload("unshared", 32, 0, 2048),
    "small": Workload("small", 4, 8192, 128),
    "one": Workload("one", 1, 0, 512),
}

# At least one request, the longest with at least one token of its own.
_SIZES = r"(?:([1-9]\d*)\*)?([1-9]\d*)x(\d+)\+(\d+(?=\.\.)|[1-9]\d*)(?:\.\.([1-9]\d*))?"


def workload(text: str) -> Workload:
    """Parse a name, or [GROUPS*]REQUESTSxSHARED+PRIVATE[..MOST]."""
    if text in NAMED:
        return NAMED[text]
    match = re.fullmatch(_SIZES, text)
    if match is None:
        raise ArgumentTypeError(
            f"workload {text!r}: known are {', '.join(NAMED)} and "
            "[GROUPS*]REQUESTSxSHARED+PRIVATE[..MOST]"
        )
    groups, each, shared, private = map(int, match.groups("1")[:4])
    if shared == private == 0 and each > 1:
        raise ArgumentTypeError(f"workload {text!r}: its first prompt is empty")
    return Workload(text, each, shared, private, groups, int(match[5]) if match[5] else None)
