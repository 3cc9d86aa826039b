"""PAT's packings on row tiles: each pack an item of its own, its results merged by another launch.

A strategy (plan/profit.py) says for every node and tail whether it absorbs the KV above it; that
makes packs, stretches of KV with the requests that read them together. A pack of several requests
becomes tiles of up to TILE_ROWS / group_size of them. Packs of one request, the tails, share tiles
too, as many of them in each as is predicted to be fastest, except in the strategy `query`, which
has one request a tile. Such plans do not grow: they are for one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.packs import make_packs
from sgl_prefix_attn.plan.profit import choose_packing
from sgl_prefix_attn.plan.query_rows import cut_evenly, order_leaves
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tile_words import RowTilePlan, serialize_row_tiles
from sgl_prefix_attn.plan.row_tiles import Cut, RowTiles, count_blocks
from sgl_prefix_attn.records import Forest

# Requests and KV of one tile: places of its requests in the order of leaves, and runs as rows of
# RowTiles.run.
Tile = tuple[np.ndarray, list[tuple[int, int, int, int, int]]]


@dataclass(frozen=True)
class Merges:
    """What another launch merges: request r has the parts [offset[r], offset[r+1]), none where a
    tile wrote its output.

    offset int32 [B+1]; tile, query int32 [...] partial tile of each part, and which of its queries
    """

    offset: np.ndarray
    tile: np.ndarray
    query: np.ndarray


def strategy_cut(planner: RowTilePlanner, forest: Forest, name: str, costs: CostModel) -> Cut:
    """The cut of a strategy's tiles that is predicted to be fastest (its merge aside)."""
    leaves = order_leaves(forest)
    most = W.queries_per_tile(planner.heads.group_size)
    packs = make_packs(forest, choose_packing(forest, name, costs))
    place = np.argsort(leaves.request)
    shared: list[Tile] = []
    tails: list[tuple[int, int, int]] = []  # place, KV from, tokens
    bounds = (packs.kv_start, packs.kv_end, packs.query_offset[:-1], packs.query_offset[1:])
    for start, end, first, last in np.stack(bounds, 1).tolist():
        places = np.sort(place[packs.queries[first:last]])
        if places.size == 1:
            tails.append((int(places[0]), start, end - start))
            continue
        edge = cut_evenly(places.size, most)
        for low, high in zip(edge[:-1], edge[1:], strict=True):
            mine = places[low:high]
            request = int(leaves.request[mine[0]])
            shared.append((mine, [(request, start, end - start, 0, mine.size)]))
    tails.sort()

    def cuts() -> Iterator[Cut]:
        width = 1 if name == "query" else most
        while width >= 1:
            tiles = shared + list(_side_by_side(tails, width, leaves.request))
            at = np.concatenate([places for places, _ in tiles])
            row_tiles = _row_tiles(tiles, planner.heads.group_size)
            own = replace(leaves, request=leaves.request[at], query=leaves.query[at])
            yield from planner.split(forest.unique_tokens, own, row_tiles)
            width //= 2

    return min(cuts(), key=lambda cut: cut.us)


def _side_by_side(tails: list[tuple[int, int, int]], width: int, request) -> Iterator[Tile]:
    """Tiles of up to `width` packs of one request each."""
    edge = cut_evenly(len(tails), width)
    for low, high in zip(edge[:-1], edge[1:], strict=True):
        mine = tails[low:high]
        yield (
            np.array([at for at, _, _ in mine]),
            [(int(request[at]), start, n, i, i + 1) for i, (at, start, n) in enumerate(mine)],
        )


def _row_tiles(tiles: list[Tile], group_size: int) -> RowTiles:
    queries = [places.size for places, _ in tiles]
    runs = [len(runs) for _, runs in tiles]
    offset = np.cumsum([0, *runs]).astype(np.int32)
    run = np.array([one for _, runs in tiles for one in runs], np.int32)
    blocks = np.zeros((len(tiles), 5), np.int32)
    for t, count in enumerate(queries):
        count_blocks(run, offset[t], offset[t + 1], count, group_size, blocks[t])
    return RowTiles(np.cumsum([0, *queries]).astype(np.int32), offset, run, blocks)


def serialize_parts(forest: Forest, cut: Cut, group_size: int) -> tuple[RowTilePlan, Merges]:
    """The plan of a cut in whose tiles a request may be several times; what it leaves to merge.

    A tile writes its output only where each of its requests is in no other item.
    """
    plan = serialize_row_tiles(forest, cut, group_size, headroom=0)
    words, batch = plan.words.copy(), forest.tail_parent.size
    words[W.H_BATCH] = batch
    size, count = W.item_words(group_size), int(words[W.H_NUM_ITEMS])
    items = words[W.HEADER_WORDS :][: count * size].reshape(count, size)
    queries = [item[W.I_QUERIES :][: item[W.I_ROWS] // group_size].copy() for item in items]
    parts = np.bincount(np.concatenate(queries), minlength=batch)
    left = [i for i in range(count) if (parts[queries[i]] > 1).any()]
    items[:, W.I_PART], items[:, W.I_PARTS] = 0, 1
    items[left, W.I_PARTS] = 2  # not the only one: the kernel asks no more
    items[left, W.I_PARTIAL] = np.arange(len(left))
    rows = [(r, t, q) for t, i in enumerate(left) for q, r in enumerate(queries[i].tolist())]
    table = np.array(sorted(rows), np.int32).reshape(-1, 3)
    offset = np.searchsorted(table[:, 0], np.arange(batch + 1)).astype(np.int32)
    plan = replace(
        plan,
        words=words,
        num_partial_tiles=len(left),
        num_counters=0,
        stats=replace(plan.stats, num_partials=len(table)),
    )
    return plan, Merges(offset, table[:, 1].copy(), table[:, 2].copy())
