"""A plan as plain rows: nodes, packs and work items, the latter read back from its words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.plan.tiles import TileSet
from sgl_prefix_attn.records import Decision, Forest, HeadConfig, Plan


@dataclass(frozen=True)
class NodeView:
    """A forest node: KV positions [start, end) that `requests` share; parent -1 at a root."""

    parent: int
    start: int
    end: int
    requests: tuple[int, ...]


@dataclass(frozen=True)
class PackView:
    """`requests` read KV positions [start, end) together; a tail's pack grows with its request.

    nodes  forest nodes whose KV the pack reads: none for a plain tail, more than one (or one and a
           tail) where the profit model merged
    """

    start: int
    end: int
    requests: tuple[int, ...]
    nodes: tuple[int, ...]
    grows: bool

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def merged(self) -> bool:
        return len(self.nodes) + self.grows > 1


@dataclass(frozen=True)
class ItemView:
    """A work item, in the order of its tile's queue; it is run once per KV head.

    packs   its pack, or the tails that it packs side by side
    ranges  KV positions [start, end) of this split, one pair per pack
    """

    packs: tuple[int, ...]
    split: int
    num_splits: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(end - start for start, end in self.ranges)


@dataclass(frozen=True)
class PlanView:
    """All of a plan that text and figure show; queues[i] holds the items of tile_set.tiles[i]."""

    plan: Plan
    heads: HeadConfig
    tile_set: TileSet
    nodes: tuple[NodeView, ...]
    packs: tuple[PackView, ...]
    queues: tuple[tuple[ItemView, ...], ...]
    decision: Decision


def view(plan: Plan, decision: Decision, heads: HeadConfig, tile_set: TileSet) -> PlanView:
    """Read a plan that was made for these heads and tiles.

    Raises ValueError where its words have another layout.
    """
    if plan.words[L.H_VERSION] != L.VERSION:
        raise ValueError(f"layout {plan.words[L.H_VERSION]} of the plan's words, not {L.VERSION}")
    return PlanView(
        plan=plan,
        heads=heads,
        tile_set=tile_set,
        nodes=tuple(node_views(plan.forest)),
        packs=tuple(pack_views(plan)),
        queues=tuple(tuple(_items(plan, tile)) for tile in range(len(tile_set.tiles))),
        decision=decision,
    )


def node_views(forest: Forest) -> Iterator[NodeView]:
    requests: list[list[int]] = [[] for _ in forest.parent]
    for row in range(forest.tail_parent.size):
        for node in _path(forest, row):
            requests[node].append(row)
    for i, rows in enumerate(requests):
        start, end = int(forest.start[i]), int(forest.end[i])
        yield NodeView(int(forest.parent[i]), start, end, tuple(rows))


def pack_views(plan: Plan) -> Iterator[PackView]:
    packs, forest = plan.packs, plan.forest
    for i, first in enumerate(packs.query_offset[:-1]):
        requests = packs.queries[first : packs.query_offset[i + 1]].tolist()
        start, end = int(packs.kv_start[i]), int(packs.kv_end[i])
        nodes = [
            node
            for node in _path(forest, requests[0])
            if start <= forest.start[node] and forest.end[node] <= end
        ]
        yield PackView(start, end, tuple(requests), tuple(nodes[::-1]), bool(packs.tail[i] >= 0))


def _path(forest: Forest, row: int) -> list[int]:
    """The request's nodes, deepest first."""
    nodes, node = [], int(forest.tail_parent[row])
    while node >= 0:
        nodes.append(node)
        node = int(forest.parent[node])
    return nodes


def _items(plan: Plan, tile: int) -> Iterator[ItemView]:
    words = plan.words
    segments = _section(words, L.H_SEGMENTS, words[L.H_NUM_SEGMENTS], L.SEGMENT_WORDS)
    tails = _section(words, L.H_TAILS, plan.batch_size, L.TAIL_WORDS)
    queue = L.H_QUEUES + 2 * tile
    # A segment per pack, in the packs' order.
    pack_at = {int(dst): pack for pack, dst in enumerate(segments[:, L.S_DST])}
    for item in _section(words, queue, words[queue + 1], L.ITEM_WORDS):
        if item[L.I_LEN] == L.GROWS:
            first = words[L.H_ENTRIES] + item[L.I_ENTRY] * L.ENTRY_WORDS
            entries = words[first:][: item[L.I_NUM_QUERIES] * L.ENTRY_WORDS]
            rows = entries.reshape(-1, L.ENTRY_WORDS)[:, L.E_ROW]
            packs = [pack_at[int(dst)] for dst in tails[rows, L.T_DST]]
        else:
            packs = [pack_at[int(item[L.I_SEGMENT])]]
        split, num_splits = int(item[L.I_SPLIT]), int(item[L.I_NUM_SPLITS])
        starts, lengths = segments[packs, L.S_START], segments[packs, L.S_LEN]
        ranges = tuple(
            (int(start) + begin, int(start) + end)
            for start, length in zip(starts, lengths, strict=True)
            for begin, end in [L.split_range(int(length), split, num_splits)]
        )
        yield ItemView(tuple(packs), split, num_splits, ranges)


def _section(words: np.ndarray, offset_word: int, count: int, width: int) -> np.ndarray:
    return words[words[offset_word] :][: count * width].reshape(-1, width)
