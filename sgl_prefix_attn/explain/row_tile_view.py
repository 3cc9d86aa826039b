"""A plan of row tiles as plain rows: tiles, what they read and their parts, read from its words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.explain.view import NodeView, node_views
from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tile_words import RowTilePlan
from sgl_prefix_attn.records import Decision, Forest, HeadConfig


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
    """requests: of the tile, as they stand in it."""

    requests: tuple[int, ...]
    runs: tuple[RunView, ...]
    parts: tuple[PartView, ...]

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
class RowTileView:
    """All of a plan that text and figure show; tiles in the order in which they are started."""

    plan: RowTilePlan
    forest: Forest
    heads: HeadConfig
    num_sms: int
    nodes: tuple[NodeView, ...]
    tiles: tuple[TileView, ...]
    decision: Decision

    @property
    def items(self) -> list[tuple[int, PartView]]:
        """(tile, part) of each work item, in the order of the tickets."""
        return [(i, part) for i, tile in enumerate(self.tiles) for part in tile.parts]


def row_tile_view(
    plan: RowTilePlan, forest: Forest, decision: Decision, planner: RowTilePlanner
) -> RowTileView:
    """Read a plan that this planner made of the forest.

    Raises ValueError where its words have another layout.
    """
    if plan.words[W.H_VERSION] != W.VERSION:
        raise ValueError(f"layout {plan.words[W.H_VERSION]} of the plan's words, not {W.VERSION}")
    return RowTileView(
        plan=plan,
        forest=forest,
        heads=planner.heads,
        num_sms=planner.num_sms,
        nodes=tuple(node_views(forest)),
        tiles=tuple(tile_views(plan, planner)),
        decision=decision,
    )


def tile_views(plan: RowTilePlan, planner: RowTilePlanner) -> Iterator[TileView]:
    """Read the tiles of a plan that this planner made, in the order in which they are started."""
    words, group = plan.words, plan.group_size
    segments = words[words[W.H_SEGMENTS] :][: words[W.H_NUM_SEGMENTS] * W.SEGMENT_WORDS]
    segments = segments.reshape(-1, W.SEGMENT_WORDS)
    order = int(words[W.H_ORDER])
    items = words[W.HEADER_WORDS :][: plan.num_items * W.item_words(group)]
    items = items.reshape(-1, W.item_words(group))
    first = 0
    while first < len(items):
        of_tile = items[first : first + items[first, W.I_PARTS]]
        queries = of_tile[0, W.I_ROWS] // group
        requests = tuple(of_tile[0, W.I_QUERIES :][:queries].tolist())
        parts = tuple(_part(words, item, planner) for item in of_tile)
        unmasked = sum(part.unmasked for part in parts)
        end = order + unmasked + sum(part.masked for part in parts)
        here = (order <= segments[:, W.S_ORDER]) & (segments[:, W.S_ORDER] < end)
        runs = tuple(
            RunView(
                start=int(segment[W.S_START]),
                end=int(segment[W.S_START] + segment[W.S_LEN]),
                requests=tuple(requests[q] for q in _queries(int(segment[W.S_KEY]), group)),
                unmasked=bool(segment[W.S_ORDER] < order + unmasked),
            )
            for segment in segments[here]
            if segment[W.S_REQUEST] != W.NONE
        )
        yield TileView(requests, runs, parts)
        order = end + -(-queries * int(words[W.H_HEADROOM]) // W.BLOCK)
        first += len(of_tile)


def _part(words: np.ndarray, item: np.ndarray, planner: RowTilePlanner) -> PartView:
    blocks = np.arange(item[W.I_BLOCKS])
    flags = words[item[W.I_FLAGS] + blocks // W.FLAGS_PER_WORD]
    flags = flags >> (blocks % W.FLAGS_PER_WORD * W.FLAG_BITS)
    masked = int((flags & W.MASKED).sum())
    unmasked, rates = blocks.size - masked, planner.rates
    wide = item[W.I_ROWS] > W.HALF_ROWS
    us = unmasked * (rates.wide if wide else rates.narrow)
    us += masked * (rates.wide_masked if wide else rates.narrow_masked)
    us = us * planner.heads.head_dim / 128 + (rates.item if wide else rates.item / 2)
    return PartView(unmasked, masked, us)


def _queries(key: int, group: int) -> range:
    """Queries of the tile that a key is for: words.make_key backwards."""
    key &= 0xFFFFFFFF
    if W.has_bit_keys(group):
        first = (key & -key).bit_length() - 1
        return range(first, key.bit_length())
    return range((key & 0xFFFF) // group, (key >> 16) // group)
