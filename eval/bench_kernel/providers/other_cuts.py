"""Plans with one choice of the planner changed: `prefix:cutN`, `prefix:tile_64`, ...

The N-th best cut by prediction tells what a search among them may win; the others are ablations
(docs/kernel-log.md). `prefix:merged` is of the portable kernel: no node is split off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from eval.bench_kernel.providers.provider import Unsupported
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.leaves import cut_at_roots, cut_evenly, order_leaves
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.plan.search import split_tiles
from sgl_prefix_attn.plan.tiles import B_MASKED, Cut, make_tiles
from sgl_prefix_attn.records import Forest


def nth_best(number: int, planner: Planner, forest: Forest) -> Cut:
    """Return the cut that is predicted to be the number-th fastest. Raises Unsupported where there
    are not as many."""
    cuts = sorted(planner.cuts(forest), key=lambda cut: cut.us)
    if number > len(cuts):
        raise Unsupported(f"{len(cuts)} cuts in all")
    return cuts[number - 1]


def fixed_tile(rows: int, planner: Planner, forest: Forest) -> Cut:
    """Make tiles of up to so many rows, whatever is predicted."""
    leaves, group = order_leaves(forest), planner.heads.group_size
    most = rows // group

    def cuts() -> Iterator[Cut]:
        for edge in (cut_evenly(leaves.request.size, most), cut_at_roots(leaves.root, most)):
            tiles = make_tiles(forest, leaves, edge, group)
            yield from split_tiles(
                tiles, leaves, forest, planner.heads, planner.num_sms, planner.rates
            )

    return min(cuts(), key=lambda cut: cut.us)


def merged(planner: Planner, forest: Forest) -> Cut:
    """Return the best cut that splits no node off."""
    planner.splits_nodes = False
    return min(planner.cuts(forest), key=lambda cut: cut.us)


def no_split(planner: Planner, forest: Forest) -> Cut:
    """Return the best cut of tiles that are not split."""
    whole = (cut for cut in planner.cuts(forest) if cut.parts.max() == 1)
    return min(whole, key=lambda cut: cut.us)


def mean_split(planner: Planner, forest: Forest) -> Cut:
    """Split by PAT's rule (its section 6): what is longer than the mean is cut into parts that are
    not. Nothing is predicted of it."""
    cut = no_split(planner, forest)
    blocks = cut.tiles.blocks[:, : B_MASKED + 1].sum(1)
    parts = np.ceil(blocks / blocks.mean()).astype(np.int64)
    return replace(cut, parts=parts, us=math.nan)


CUTS: dict[str, Callable[[Planner, Forest], Cut]] = {
    **{f"cut{number}": partial(nth_best, number) for number in range(1, 10)},
    "tile_128": partial(fixed_tile, W.TILE_ROWS), "tile_64": partial(fixed_tile, W.HALF_ROWS),
    "no_split": no_split, "mean_split": mean_split,
}  # fmt: skip
