"""Every cut of a step that is worth predicting, with its predicted time.

The search is one compiled loop, which keeps no tiles: a new plan makes its step wait, and arrays
that go back and forth between numpy and compiled code were most of the search's time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.cut_time import time_ways
from sgl_prefix_attn.plan.kernel_rates import KernelRates, rate_values
from sgl_prefix_attn.plan.leaves import LeafOrder, cut_at_requests, cut_at_roots, cut_evenly
from sgl_prefix_attn.plan.split_nodes import Division
from sgl_prefix_attn.plan.tiles import B_MASKED, B_UNMASKED, Cut, Tiles, lay_out, make_tiles
from sgl_prefix_attn.records import Forest, HeadConfig

# Where tiles end: anywhere, so that all are about as large; at roots; between requests.
EVENLY, AT_ROOTS, AT_REQUESTS = range(3)
MOST = 96  # candidates: widths by halves from 128 on, three kinds of edges, four ways to split


class Candidate(NamedTuple):
    """A cut without its tiles: of up to `most` queries, with edges of a kind, split in the way of
    that number (cut_time.time_ways). It takes `us` microseconds and reads `blocks` of KV."""

    us: float
    most: int
    kind: int
    way: int
    blocks: int


@dataclass(frozen=True)
class Search:
    """The cuts of a step of which a Division splits nodes off, in tiles of up to `most` queries."""

    forest: Forest
    leaves: LeafOrder
    division: Division
    heads: HeadConfig
    num_sms: int
    rates: KernelRates
    tile_queries: int
    most: int

    @cached_property
    def _split_off(self) -> tuple[LeafOrder, Tiles]:
        return self.division.tiles(self.leaves, self.tile_queries, self.heads.group_size)

    def candidates(self, hopeless: float = math.inf) -> list[Candidate]:
        """List the cuts: widths by halves, cut evenly, at the roots or, where requests have several
        queries, between requests; whole or split. None behind a width all of whose cuts take
        `hopeless` times as long as the best one of those before."""
        below, leaves, (order, alone) = self.division.below, self.leaves, self._split_off
        found = _search(
            below.parent, below.start, below.end, below.tail_parent, below.tail_start,
            below.seq_lens, leaves.request, leaves.after, leaves.first, leaves.last, leaves.root,
            order.query, alone.edge, alone.blocks, 2 if below.query_lens is None else 3, self.most,
            hopeless, rate_values(self.rates), self.forest.unique_tokens, self.heads.sizes,
            self.num_sms,
        )  # fmt: skip
        return [Candidate(us, *map(int, rest)) for us, *rest in found.tolist()]

    def cut(self, candidate: Candidate) -> Cut:
        """Lay out the tiles of one of the candidates."""
        order, alone = self._split_off
        edge = edges_of(candidate.kind, self.leaves.root, self.leaves.after, candidate.most)
        tiles = make_tiles(self.division.below, self.leaves, edge, self.heads.group_size)
        if alone.edge.size > 1:
            tiles = alone.followed_by(tiles)
        ways = split_tiles(
            tiles, order, self.forest, self.heads, self.num_sms, self.rates, alone.edge.size - 1
        )
        return ways[candidate.way]


def split_tiles(
    tiles: Tiles,
    order: LeafOrder,
    forest: Forest,
    heads: HeadConfig,
    num_sms: int,
    rates: KernelRates,
    split_off: int = 0,
) -> list[Cut]:
    """Return the tiles as they are, and split until every CTA has a ticket, or some of them."""
    costs, parts, us = time_ways(
        rate_values(rates), order.query, tiles.edge, tiles.blocks, forest.unique_tokens,
        heads.sizes, num_sms,
    )  # fmt: skip
    return [Cut(order, tiles, parts[i], costs, float(us[i]), split_off) for i in range(us.size)]


@cached_njit
def edges_of(kind, root, after, most):
    if kind == EVENLY:
        return cut_evenly(root.size, most)
    return cut_at_roots(root, most) if kind == AT_ROOTS else cut_at_requests(after, most)


@cached_njit
def _search(
    parent, start, end, tail_parent, tail_start, seq_lens, request, after, first, last, root, query,
    alone_edge, alone_blocks, kinds, most, hopeless, rates, unique_tokens, heads, num_sms,
):  # fmt: skip
    found = np.empty((MOST, 5))
    size, best = 0, np.inf
    seen = [np.empty(0, np.int32)]
    while most >= 1:
        before, fastest = size, np.inf
        for kind in range(kinds):
            edge = edges_of(kind, root, after, most)
            if is_among(edge, seen):
                continue
            seen.append(edge)
            _, _, blocks = lay_out(
                parent, start, end, tail_parent, tail_start, seq_lens, request, after, first, last,
                edge, heads.group_size,
            )  # fmt: skip
            edge = np.concatenate((alone_edge, edge[1:] + alone_edge[-1]))
            blocks = np.concatenate((alone_blocks, blocks))
            _, _, us = time_ways(rates, query, edge, blocks, unique_tokens, heads, num_sms)
            for way in range(us.size):
                found[size, 0] = us[way]
                found[size, 1] = most
                found[size, 2] = kind
                found[size, 3] = way
                found[size, 4] = blocks[:, B_UNMASKED].sum() + blocks[:, B_MASKED].sum()
                size += 1
            fastest = min(fastest, us.min())
        if size > before and fastest > hopeless * best:
            return found[:before].copy()
        best = min(best, fastest)
        most //= 2
    return found[:size].copy()


@cached_njit
def is_among(edge, seen):
    for other in seen:
        if other.size == edge.size and (other == edge).all():
            return True
    return False
