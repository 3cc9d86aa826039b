"""Stand-ins for SGLang's radix tree and requests: the attributes that the plugin reads.

The tree follows RadixCache of SGLang 0.5.17: a split makes a new node for the front and the old
node keeps the rest; a match ends at a node boundary.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from sgl_prefix_attn.paths.tree_reader import RunningBatch


class Node:
    counter = 0

    def __init__(self, parent=None, tokens=(), value=()):
        self.parent, self.tokens = parent, list(tokens)
        self.value = torch.tensor(list(value), dtype=torch.int64)
        self.children = {}
        self.id = Node.counter
        Node.counter += 1


# The reader goes by the exact class of the cache.
RadixCache = type("RadixCache", (), {"__module__": "sglang.srt.mem_cache.radix_cache"})
ChunkCache = type("ChunkCache", (), {"__module__": "sglang.srt.mem_cache.chunk_cache"})
HiRadixCache = type("HiRadixCache", (RadixCache,), {"__module__": "sglang.srt.mem_cache.hiradix"})


@dataclass
class Req:
    rid: str
    req_pool_idx: int | None
    last_node: Node | None = None
    cache_protected_len: int = 0
    kv: object = field(default_factory=SimpleNamespace)

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class World:
    """A radix tree, a slot table and its requests."""

    def __init__(self, rows=16, columns=512):
        self.cache, self.root = RadixCache(), Node()
        self.req_to_token = torch.zeros(rows, columns, dtype=torch.int32)
        self.next_slot = 1
        self.reqs: list[Req] = []

    def insert(self, tokens) -> Node:
        """Node that ends `tokens`, with slots for what was not cached."""
        node, rest = self.root, list(tokens)
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                slots = range(self.next_slot, self.next_slot + len(rest))
                self.next_slot += len(rest)
                child = Node(node, rest, slots)
                node.children[rest[0]] = child
                return child
            common = _common(child.tokens, rest)
            node = child if common == len(child.tokens) else self._split(child, common)
            rest = rest[common:]
        return node

    def add(self, tokens, tail=1) -> Req:
        """A request whose first tokens are cached, with `tail` private ones."""
        req = Req(f"r{len(self.reqs)}", len(self.reqs))
        req.last_node = self.insert(tokens) if tokens else self.root
        req.cache_protected_len = len(tokens)
        row = self.req_to_token[req.req_pool_idx]
        if tokens:
            row[: len(tokens)] = torch.cat([n.value for n in path(req)]).int()
        for position in range(len(tokens), len(tokens) + tail):
            row[position] = self.next_slot
            self.next_slot += 1
        self.reqs.append(req)
        return req

    def seq_lens(self, grown=1) -> np.ndarray:
        return np.array([r.cache_protected_len + grown for r in self.reqs], dtype=np.int64)

    def batch(self, grown=1, cache=None) -> RunningBatch:
        """The requests in a step in which each has `grown` tokens beyond its cached ones."""
        return RunningBatch(self.reqs, cache or self.cache, self.seq_lens(grown), self.req_to_token)

    def _split(self, child: Node, at: int) -> Node:
        front = Node(child.parent, child.tokens[:at], child.value[:at].tolist())
        front.children = {child.tokens[at]: child}
        child.parent.children[child.tokens[0]] = front
        child.parent, child.tokens, child.value = front, child.tokens[at:], child.value[at:].clone()
        return front


def path(req: Req) -> list[Node]:
    nodes, node = [], req.last_node
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def _common(a, b) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
