"""Trees written as nodes per level _ KV tokens per level, from the roots to the leaves.

`1,4,16_128,256,1024` is one root of 128 tokens, four children of 256 and sixteen leaves of 1024.
Each leaf is one request; the last level is private and holds the token being decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.records import PathTable


@dataclass(frozen=True)
class Tree:
    """counts[i] nodes of lengths[i] KV tokens at level i."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def parse(cls, text: str):
        """Parse a tree. Raises ValueError that quotes it and says what is wrong with it."""
        halves = text.strip().split("_")
        if len(halves) != 2:
            raise ValueError(f"tree {text!r}: expected COUNTS_LENGTHS, such as 1,4,16_128,256,1024")
        try:
            counts, lengths = (tuple(map(int, half.split(","))) for half in halves)
        except ValueError:
            raise ValueError(f"tree {text!r}: counts and lengths must be integers") from None
        if len(counts) != len(lengths):
            raise ValueError(f"tree {text!r}: {len(counts)} counts but {len(lengths)} lengths")
        if min(counts + lengths) < 1:
            raise ValueError(f"tree {text!r}: counts and lengths must be at least 1")
        if list(counts) != sorted(counts):
            raise ValueError(f"tree {text!r}: a level has fewer nodes than the one above it")
        return cls(counts, lengths)

    @property
    def batch_size(self) -> int:
        return self.counts[-1]

    @property
    def seq_len(self) -> int:
        return sum(self.lengths)

    @property
    def unique_tokens(self) -> int:
        """Count the KV tokens of all nodes, each counted once."""
        return sum(count * length for count, length in zip(self.counts, self.lengths, strict=True))

    def parent(self, level: int, node: np.ndarray) -> np.ndarray:
        """Return the indices at level - 1 of what each `node` of `level` hangs below."""
        return node * self.counts[level - 1] // self.counts[level]

    def paths(self) -> PathTable:
        """Return the nodes of all levels but the last, level by level, and the requests."""
        first = np.cumsum((0, *self.counts))
        parents = [np.full(self.counts[0], -1)]
        for level, count in enumerate(self.counts[1:], start=1):
            parents.append(first[level - 1] + self.parent(level, np.arange(count)))
        parent, shared = np.concatenate(parents), first[-2]
        length = np.repeat(self.lengths, self.counts)[:shared]
        seq_lens = np.full(self.batch_size, self.seq_len)
        return PathTable.of(parent[:shared], length, leaf=parent[shared:], seq_lens=seq_lens)
