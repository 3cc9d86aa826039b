"""Request sets: a batch of prompts with one shared part and private rests."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """`batch` requests of `shared` common and `private` own prompt tokens."""

    name: str
    batch: int
    shared: int
    private: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Draw the same tokens whenever called; other workloads share none of them."""
        rng = random.Random(self.name)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(vocab_size // 8, vocab_size) for _ in range(count)]

        prefix = tokens(self.shared)
        return [prefix + tokens(self.private) for _ in range(self.batch)]

    def facts(self) -> dict:
        """Return what a row says of it."""
        sizes = {"batch": self.batch, "shared": self.shared, "private": self.private}
        return {"workload": self.name} | sizes

    def kv_tokens(self, new_tokens: int) -> int:
        """Return how many KV tokens the pool must hold while all requests run."""
        return self.shared + self.batch * (self.private + new_tokens)


NAMED = {
    "shared8k": Workload("shared8k", 64, 8192, 256),
    "shared2k": Workload("shared2k", 64, 2048, 128),
    "unshared": Workload("unshared", 32, 0, 2048),
    "small": Workload("small", 4, 8192, 128),
    "one": Workload("one", 1, 0, 512),
}


def parse_workloads(text: str) -> list[Workload]:
    """Parse names, or BATCHxSHARED+PRIVATE, separated by commas. Raises ValueError quoting a bad
    one."""
    workloads = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", part)
        if part in NAMED:
            workloads.append(NAMED[part])
        elif match and int(match[1]) > 0 and int(match[3]) > 0:
            workloads.append(Workload(part, *map(int, match.groups())))
        else:
            raise ValueError(
                f"workload {part!r}: known are {', '.join(NAMED)} and BATCHxSHARED+PRIVATE"
            )
    return workloads
