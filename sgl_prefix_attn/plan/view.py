"""A plan as plain rows: nodes, tiles, what they read and their parts, read back from its words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.plan.schedule import Ticket, in_rounds
from sgl_prefix_attn.records import Decision, Forest, HeadConfig

MOST_ROWS = 24  # of nodes and tiles as text; large batches have hundreds


@dataclass(frozen=True)
class NodeView:
    """A forest node: KV positions [start, end) that `requests` share; parent -1 at a root."""

    parent: int
    start: int
    end: int
    requests: tuple[int, ...]


@dataclass(frozen=True)
class RunView:
    """KV positions [start, end) of one request's row, which `requests` of the tile attend to;
    unmasked: in whole blocks that all of them do."""

    start: int
    end: int
    requests: tuple[int, ...]
    unmasked: bool


@dataclass(frozen=True)
class PartView:
    """A work item, run once per KV head: its blocks, and a CTA's microseconds as the planner has
    them."""

    unmasked: int
    masked: int
    us: float


@dataclass(frozen=True)
class TileView:
    """requests: of the tile, as they stand in it; split_off: it holds KV of a node that is an item
    of its own, beside the tiles that grow."""

    requests: tuple[int, ...]
    runs: tuple[RunView, ...]
    parts: tuple[PartView, ...]
    split_off: bool = False

    @property
    def tokens(self) -> int:
        return sum(run.end - run.start for run in self.runs)

    @property
    def unmasked(self) -> int:
        return sum(part.unmasked for part in self.parts)

    @property
    def masked(self) -> int:
        return sum(part.masked for part in self.parts)


@dataclass(frozen=True)
class NodeDecision:
    """Whether a node is split off in the plan, and the step's predicted microseconds with all nodes
    merged and with this one alone split off (Planner.node_costs)."""

    split: bool
    merged_us: float
    split_us: float


@dataclass(frozen=True)
class PlanView:
    """All of a plan that text and figure show; tiles in the order in which they are started, and
    a decision for each node that text shows where the planner may split nodes off."""

    plan: Plan
    forest: Forest
    heads: HeadConfig
    num_sms: int
    nodes: tuple[NodeView, ...]
    tiles: tuple[TileView, ...]
    decision: Decision
    decisions: tuple[NodeDecision, ...] = ()

    @property
    def items(self) -> list[tuple[int, PartView]]:
        """List (tile, part) of each work item, in the order of the tickets."""
        return [(i, part) for i, tile in enumerate(self.tiles) for part in tile.parts]

    @property
    def tickets(self) -> list[Ticket]:
        """List each item's work for each KV head, in turn."""
        return list(
            in_rounds([part.us for _, part in self.items], self.heads.num_kv_heads, self.num_sms)
        )


def view(plan: Plan, forest: Forest, decision: Decision, planner: Planner) -> PlanView:
    """Read a plan that this planner made of the forest."""
    nodes, tiles = tuple(node_views(forest)), tuple(tile_views(plan, planner))
    return PlanView(
        plan=plan,
        forest=forest,
        heads=planner.heads,
        num_sms=planner.num_sms,
        nodes=nodes,
        tiles=tiles,
        decision=decision,
        decisions=tuple(_decisions(nodes, tiles, forest, planner)),
    )


def node_views(forest: Forest) -> Iterator[NodeView]:
    requests: list[list[int]] = [[] for _ in forest.parent]
    for row, node in enumerate(forest.tail_parent.tolist()):
        while node >= 0:
            requests[node].append(row)
            node = int(forest.parent[node])
    for i, rows in enumerate(requests):
        start, end = int(forest.start[i]), int(forest.end[i])
        yield NodeView(int(forest.parent[i]), start, end, tuple(rows))


def _decisions(
    nodes: tuple[NodeView, ...],
    tiles: tuple[TileView, ...],
    forest: Forest,
    planner: Planner,
) -> Iterator[NodeDecision]:
    if not planner.splits_nodes:
        return
    alone = [tile for tile in tiles if tile.split_off]
    costs = planner.node_costs(forest, MOST_ROWS).tolist()
    for node, (merged_us, split_us) in zip(nodes, costs, strict=False):
        split = any(
            set(tile.requests) & set(node.requests)
            and min(run.start for run in tile.runs) <= node.start
            and node.end <= max(run.end for run in tile.runs)
            for tile in alone
        )
        yield NodeDecision(split, merged_us, split_us)


def tile_views(
    plan: Plan, planner: Planner, query_lens: np.ndarray | None = None
) -> Iterator[TileView]:
    """Read the tiles of a plan that this planner made, in the order in which they are started;
    query_lens int32 [B] are those of the plan."""
    words, group = plan.words, plan.group_size
    lens = np.ones(plan.batch_size, np.int32) if query_lens is None else query_lens
    request_of = np.repeat(np.arange(plan.batch_size), lens)  # of each row of q
    segments = words[words[W.H_SEGMENTS] :][: words[W.H_NUM_SEGMENTS] * W.SEGMENT_WORDS]
    segments = segments.reshape(-1, W.SEGMENT_WORDS)
    by_order = np.argsort(segments[:, W.S_ORDER], kind="stable")
    orders = segments[by_order, W.S_ORDER]
    order = int(words[W.H_ORDER])
    items = plan.items
    edges = [*np.flatnonzero(items[:, W.I_PART] == 0).tolist(), len(items)]
    for first, end_item in pairwise(edges):
        of_tile = items[first:end_item]
        queries = of_tile[0, W.I_ROWS] // group
        requests = request_of[of_tile[0, W.I_QUERIES :][:queries]].tolist()
        parts = tuple(_part(words, item, planner) for item in of_tile)
        unmasked = sum(part.unmasked for part in parts)
        end = order + unmasked + sum(part.masked for part in parts)
        here = np.sort(by_order[slice(*np.searchsorted(orders, (order, end)))])
        runs = tuple(
            RunView(
                start=int(segment[W.S_START]),
                end=int(segment[W.S_START] + segment[W.S_LEN]),
                requests=_once(requests[q] for q in _queries(int(segment[W.S_KEY]), plan)),
                unmasked=bool(segment[W.S_ORDER] < order + unmasked),
            )
            for segment in segments[here]
            if segment[W.S_REQUEST] != W.NONE
        )
        growing = of_tile[:, W.I_GROWING]
        yield TileView(_once(requests), runs, parts, split_off=not growing.any())
        order = end + int((-(-growing * words[W.H_HEADROOM] // W.BLOCK)).sum())


def _once(requests: Iterable[int]) -> tuple[int, ...]:
    """Return the requests, each where it comes first."""
    return tuple(dict.fromkeys(requests))


def _part(words: np.ndarray, item: np.ndarray, planner: Planner) -> PartView:
    blocks = np.arange(item[W.I_BLOCKS])
    flags = words[item[W.I_FLAGS] + blocks // W.FLAGS_PER_WORD]
    flags = flags >> (blocks % W.FLAGS_PER_WORD * W.FLAG_BITS)
    masked = int((flags & W.MASKED).sum())
    unmasked, rates = blocks.size - masked, planner.rates
    wide = item[W.I_ROWS] > planner.rates.narrow_rows
    us = unmasked * (rates.wide if wide else rates.narrow)
    us += masked * (rates.wide_masked if wide else rates.narrow_masked)
    heads = planner.heads
    us = us * (heads.head_dim + heads.value_dim) / 256 + (rates.item if wide else rates.item / 2)
    return PartView(unmasked, masked, us)


def _queries(key: int, plan: Plan) -> range:
    """Queries of the tile that a key is for: words.make_key backwards."""
    key &= 0xFFFFFFFF
    if W.has_bit_keys(plan.group_size, plan.tile_rows):
        first = (key & -key).bit_length() - 1
        return range(first, key.bit_length())
    return range((key & 0xFFFF) // plan.group_size, (key >> 16) // plan.group_size)
