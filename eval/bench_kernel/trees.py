"""The trees of the benchmarks (sgl_prefix_attn/explain/tree.py), their paths and KV slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.explain import tree

# The trees of PAT's kernel evaluation (its figure 8, extended by two without sharing).
PAT20 = (
    "1,10_4096,416",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,2,64_1024,256,256",
    "1,4,256_32,256,32",
    "1,8,512_32,512,256",
    "1,8,512_32,2048,256",
    "1,8,512_512,512,256",
    "1,4,8,256_32,256,256,32",
    "1,4,16,512_1024,256,128,32",
    "1,4,16,64,256,1024_256,32,256,64,32,256",
    "1,16,32,64,128,1024_256,128,64,32,32,32",
    "1,16,32,64,256,1024_256,128,64,32,32,32",
    "1,8,16,32,64,128,1024_256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024_256,128,64,32,32,32,32",
    "2,8,16,256_256,256,32,32",
    "4,16,256,512_512,32,128,32",
    "8,16,32,256_512,512,256,32",
    "256_1024",
    "256_4096",
)


class Tree(tree.Tree):
    """A tree with what benchmarks ask of it."""

    @property
    def name(self) -> str:
        return ",".join(map(str, self.counts)) + "_" + ",".join(map(str, self.lengths))

    @property
    def num_tokens(self) -> int:
        """KV tokens of the whole tree, each counted once."""
        return sum(n * length for n, length in zip(self.counts, self.lengths, strict=True))

    @property
    def has_sharing(self) -> bool:
        return self.counts[0] < self.counts[-1]

    def node_of_request(self) -> np.ndarray:
        """Return each request's node at each level, int64 [levels, B]."""
        rows = [np.arange(self.batch_size)]
        for level in range(len(self.counts) - 1, 0, -1):
            rows.append(self.parent(level, rows[-1]))
        return np.stack(rows[::-1])

    def prefix_paths(self) -> list[list[tuple[int, int]]]:
        """Return each request's path as (node_id, length), without the private last level."""
        first = np.cumsum((0, *self.counts))
        nodes = self.node_of_request()[:-1]
        return [
            [
                (int(first[level] + nodes[level, i]), self.lengths[level])
                for level in range(len(nodes))
            ]
            for i in range(self.batch_size)
        ]


def parse_trees(spec: str) -> list[Tree]:
    """Parse `pat20`, or trees separated by `;`. Raises ValueError for a tree that does not parse
    and an empty list."""
    texts = PAT20 if spec == "pat20" else [text for text in spec.split(";") if text.strip()]
    if not texts:
        raise ValueError(f"trees {spec!r}: no tree in it")
    return [Tree.parse(text) for text in texts]


@dataclass(frozen=True)
class IndexTables:
    """Where the KV of a tree lies in a paged pool.

    node_slots   per level int32 [nodes, length]
    req_to_token int32 [B, seq_len]  the slots of each request in order
    num_slots    slots of the pool, a multiple of the page size
    """

    node_slots: tuple[np.ndarray, ...]
    req_to_token: np.ndarray
    num_slots: int


def page_problem(tree: Tree, page_size: int) -> str | None:
    """Say why SGLang could not hold this tree at this page size: nodes other than leaves are whole
    pages there."""
    for length in tree.lengths[:-1]:
        if length % page_size:
            return f"a shared node of {length} tokens is no multiple of the page size {page_size}"
    return None


# How a tree's KV lies in the pool: pages at random, or each node's in a row.
LAYOUTS = ("permuted", "contiguous")


def build_tables(
    tree: Tree, page_size: int, rng: np.random.Generator, layout: str = "permuted"
) -> IndexTables:
    """Assign slots to every node, by page in one of LAYOUTS; page 0 and two more pages stay unused.

    Raises ValueError when the tree does not fit the page size.
    """
    problem = page_problem(tree, page_size)
    if problem is not None:
        raise ValueError(f"tree {tree.name}: {problem}")
    pages_per_node = [-(-length // page_size) for length in tree.lengths]
    num_pages = sum(n * p for n, p in zip(tree.counts, pages_per_node, strict=True)) + 3
    order = np.arange(1, num_pages)
    if layout == "permuted":
        order = rng.permutation(order)
    node_slots, taken = [], 0
    for n, pages, length in zip(tree.counts, pages_per_node, tree.lengths, strict=True):
        own = order[taken : taken + n * pages].reshape(n, pages, 1)
        taken += n * pages
        slots = own * page_size + np.arange(page_size)
        node_slots.append(slots.reshape(n, -1)[:, :length].astype(np.int32))
    nodes = tree.node_of_request()
    rows = [slots[nodes[level]] for level, slots in enumerate(node_slots)]
    return IndexTables(tuple(node_slots), np.concatenate(rows, axis=1), num_pages * page_size)
