"""Stand-ins for SGLang's radix tree and requests: the attributes that the plugin reads.

The tree follows SGLang's: a split makes a new node for the front and the old node keeps the rest; a
match ends at a node boundary. It is shown as each of SGLang's caches shows it (TREES).
"""

from dataclasses import dataclass, field
from os.path import commonprefix
from types import SimpleNamespace

import msgspec
import numpy as np
import torch

from sgl_prefix_attn.paths.tree_reader import RunningBatch, record_of


class Node:
    counter = 0

    def __init__(self, parent=None, tokens=(), value=()):
        self.parent, self.tokens = parent, list(tokens)
        self.value = torch.tensor(list(value), dtype=torch.int64)
        self.component_data = [self]  # as UnifiedRadixCache's core keeps the slots
        self.children = {}
        self.id = Node.counter
        Node.counter += 1


# The reader goes by the exact class of the cache.
RadixCache = type("RadixCache", (), {"__module__": "sglang.srt.mem_cache.radix_cache"})
ChunkCache = type("ChunkCache", (), {"__module__": "sglang.srt.mem_cache.chunk_cache"})
HiRadixCache = type("HiRadixCache", (), {"__module__": "sglang.srt.mem_cache.hiradix_cache"})
LMCRadixCache = type("LMCRadixCache", (RadixCache,), {"__module__": "sglang.srt.mem_cache.lmc"})


class UnifiedRadixCache:
    __module__ = "sglang.srt.mem_cache.unified_radix_cache"
    tree_components = (0,)
    cache_controller = linker = tree_core = None


class Told:
    @property
    def seqlen(self) -> int:
        """Tokens of the request in the results that the host has processed: one behind its cached
        ones, whatever it has accepted since."""
        return record_of(self).cache_protected_len + 1


@dataclass
class Req(Told):
    rid: str
    req_pool_idx: int | None
    last_node: Node | None = None
    cache_protected_len: int = 0
    kv: object = field(default_factory=SimpleNamespace)
    retraction_count: int = 0

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class RecordReq(Told):
    """A request from SGLang 0.5.19 on: nodes are ids, and its KV record has the rest."""

    def __init__(self, rid: str, req_pool_idx: int | None):
        self.rid, self.last_node, self.retraction_count = rid, None, 0
        self.kv = SimpleNamespace(cache_protected_len=0, req_pool_idx=req_pool_idx)


class UnifiedTreeCore:
    """Core in Python until 0.5.21: node objects by their ids."""

    def __init__(self, world):
        self.world = world

    def node_by_id(self, node_id):
        return self.world.nodes()[node_id]


class PathNode(msgspec.Struct, frozen=True):
    """SGLang's TreePathNodeInfo."""

    node_id: int
    parent_id: int
    path_start: int
    path_end: int
    full_value_len: int | None


class PathTellingCore:
    """Core from 0.5.22 on: paths of numbers, whatever they come from."""

    def __init__(self, world):
        self.world = world

    def collect_path_info(self, ends):
        return tuple(tuple(self._path(end)) for end in ends)

    def _path(self, end):
        start = 0
        for node in ancestors(self.world.nodes()[end]):
            stop = start + len(node.tokens)
            held = None if node.value is None else len(node.value)
            yield PathNode(node.id, node.parent.id, start, stop, held)
            start = stop


CORES = {"unified_by_node": UnifiedTreeCore, "unified_by_path": PathTellingCore}
TREES = ("radix", *CORES)


class World:
    """A radix tree, a slot table and its requests."""

    def __init__(self, rows=16, columns=512, tree="radix"):
        self.cache, self.root = RadixCache(), Node()
        self.unified = tree in CORES
        if self.unified:
            self.cache = UnifiedRadixCache()
            self.cache.tree_core = CORES[tree](self)
            self.cache.path_device_indices = lambda node: torch.cat(
                [n.value for n in ancestors(self.nodes()[node])]
            )
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
            common = len(commonprefix([child.tokens, rest]))
            node = child if common == len(child.tokens) else self._split(child, common)
            rest = rest[common:]
        return node

    def add(self, tokens, tail=1) -> Req:
        """A request whose first tokens are cached, with `tail` private ones."""
        i_req = len(self.reqs)
        req = (RecordReq if self.unified else Req)(f"r{i_req}", i_req)
        node = self.insert(tokens) if tokens else self.root
        req.last_node = node.id if self.unified else node
        (req.kv if self.unified else req).cache_protected_len = len(tokens)
        row = self.req_to_token[i_req]
        if tokens:
            row[: len(tokens)] = torch.cat([n.value for n in ancestors(node)]).int()
        for position in range(len(tokens), len(tokens) + tail):
            row[position] = self.next_slot
            self.next_slot += 1
        self.reqs.append(req)
        return req

    def seq_lens(self, grown=1) -> np.ndarray:
        return np.array(
            [record_of(r).cache_protected_len + grown for r in self.reqs], dtype=np.int64
        )

    def nodes(self) -> dict[int, Node]:
        """Every node of the tree by its id."""
        found, left = {}, [self.root]
        while left:
            node = left.pop()
            found[node.id] = node
            left += node.children.values()
        return found

    def path(self, req) -> list[Node]:
        """Nodes of a request's path, from the root down."""
        return ancestors(self.nodes()[req.last_node] if self.unified else req.last_node)

    def batch(self, grown=1, cache=None) -> RunningBatch:
        """The requests in a step in which each has `grown` tokens beyond its cached ones."""
        return RunningBatch(self.reqs, cache or self.cache, self.seq_lens(grown), self.req_to_token)

    def _split(self, child: Node, at: int) -> Node:
        front = Node(child.parent, child.tokens[:at], child.value[:at].tolist())
        front.children = {child.tokens[at]: child}
        child.parent.children[child.tokens[0]] = front
        child.parent, child.tokens, child.value = front, child.tokens[at:], child.value[at:].clone()
        return front


def ancestors(node: Node | None) -> list[Node]:
    """The path to a node, itself included and the root left out."""
    nodes = []
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]
