"""Requests whose first KV slots are the same ones, and the radix tree that says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.support.fake_sglang import Node, Req


@dataclass(frozen=True)
class Sharing:
    """Who shares what.

    nodes  (parent, tokens), parents first, -1 at a root
    leaf   node where the shared part of each request's path ends, -1 without one; requests beyond
           them share nothing
    """

    nodes: tuple[tuple[int, int], ...] = ()
    leaf: tuple[int, ...] = ()

    def path(self, i_req: int) -> list[int]:
        """Shared nodes of a request, from the root down."""
        path, node = [], self.leaf[i_req] if i_req < len(self.leaf) else -1
        while node >= 0:
            path.append(node)
            node = self.nodes[node][0]
        return path[::-1]

    def tokens(self, i_req: int) -> int:
        """How many tokens a request shares."""
        return sum(self.nodes[node][1] for node in self.path(i_req))

    @property
    def num_shared(self) -> int:
        """Nodes of several requests."""
        below = Counter(node for i in range(len(self.leaf)) for node in self.path(i))
        return sum(requests > 1 for requests in below.values())

    def owners(self, i_req: int) -> list[int]:
        """The first request that has the slot, for each position that a request shares."""
        first = {}
        for i in range(len(self.leaf)):
            for node in self.path(i):
                first.setdefault(node, i)
        return [first[node] for node in self.path(i_req) for _ in range(self.nodes[node][1])]

    def requests(
        self, req_to_token: torch.Tensor, rows: Sequence[int], cached: Sequence[int]
    ) -> list[Req]:
        """Make requests whose paths hold their cached tokens: the shared nodes, then one of the
        request's own. Slots are those of req_to_token, [rows, positions]."""
        root, known, reqs = Node(), {}, []
        for i_req, (row, total) in enumerate(zip(rows, cached, strict=True)):
            node, start = root, 0
            shared = [(name, self.nodes[name][1]) for name in self.path(i_req)]
            for name, length in (*shared, (f"of {i_req}", total - self.tokens(i_req))):
                if length:
                    slots = req_to_token[row, start : start + length].tolist()
                    node = known.setdefault(name, Node(node, (), slots))
                start += length
            reqs.append(Req(f"r{i_req}", row, node, total))
        return reqs
