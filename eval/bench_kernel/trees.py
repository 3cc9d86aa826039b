"""The trees of the benchmarks (sgl_prefix_attn/tools/explain/tree.py) and their paths."""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.tools.explain import tree

# The trees of PAT's kernel evaluation (its figure 8, extended by two without sharing).
PAT20 = (
    "1,10_4096,416", "1,256_256,32", "1,1024_2048,32", "1,2,64_1024,256,256", "1,4,256_32,256,32",
    "1,8,512_32,512,256", "1,8,512_32,2048,256", "1,8,512_512,512,256", "1,4,8,256_32,256,256,32",
    "1,4,16,512_1024,256,128,32", "1,4,16,64,256,1024_256,32,256,64,32,256",
    "1,16,32,64,128,1024_256,128,64,32,32,32", "1,16,32,64,256,1024_256,128,64,32,32,32",
    "1,8,16,32,64,128,1024_256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024_256,128,64,32,32,32,32", "2,8,16,256_256,256,32,32",
    "4,16,256,512_512,32,128,32", "8,16,32,256_512,512,256,32", "256_1024", "256_4096",
)  # fmt: skip


class Tree(tree.Tree):
    """A tree with what benchmarks ask of it."""

    @property
    def name(self) -> str:
        return ",".join(map(str, self.counts)) + "_" + ",".join(map(str, self.lengths))

    @property
    def tokens(self) -> int:
        """KV tokens of all requests."""
        return self.batch_size * self.seq_len

    @property
    def has_sharing(self) -> bool:
        return self.counts[0] < self.counts[-1]

    def node_of_request(self) -> np.ndarray:
        """Return each request's node at each level, int64 [levels, B]."""
        rows = [np.arange(self.batch_size)]
        for level in range(len(self.counts) - 1, 0, -1):
            rows.append(self.parent(level, rows[-1]))
        return np.stack(rows[::-1])

    def first_requests(self, level: int) -> np.ndarray:
        """Return int64 [nodes + 1]: where each node's requests, which are consecutive, begin."""
        return np.searchsorted(self.node_of_request()[level], np.arange(self.counts[level] + 1))


def parse_trees(spec: str) -> list[Tree]:
    """Parse `pat20`, or trees separated by `;`. Raises ValueError for a tree that does not parse
    and an empty list."""
    texts = PAT20 if spec == "pat20" else [text for text in spec.split(";") if text.strip()]
    if not texts:
        raise ValueError(f"trees {spec!r}: no tree in it")
    return [Tree.parse(text) for text in texts]


def page_problem(tree: Tree, page_size: int) -> str | None:
    """Say why SGLang could not hold this tree at this page size: nodes other than leaves are whole
    pages there."""
    for length in tree.lengths[:-1]:
        if length % page_size:
            return f"a shared node of {length} tokens is no multiple of the page size {page_size}"
    return None
