"""A plan as a picture: the forest, its packs and their KV splits, the words, the CTAs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text as MplText

from sgl_prefix_attn.explain.schedule import Run, num_ctas, schedule
from sgl_prefix_attn.explain.text import reads, tile_name
from sgl_prefix_attn.explain.view import NodeView, PlanView
from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.records import Forest, StepPlan

INK, MUTED, FILL, PRIVATE = "#1f2933", "#66727f", "#dbe4ee", "#f4f5f3"
SHARED = ("#2f6db3", "#d4732a", "#3c9a6b", "#a8478f", "#8a6d1f", "#c0404d", "#4c5fb8", "#2a9aa5")
WIDTH_IN, DPI = 12.0, 120

Labels = list[tuple[MplText, Patch]]


def draw(view: PlanView) -> Figure:
    """Draw a plan; the caller saves or shows the figure."""
    rows_in = min(4.0, 0.6 + 0.27 * view.plan.batch_size)
    heights = (rows_in, rows_in, 0.4, 1.2, 1.2)
    figure, (forest, packs, words, shared, tails) = new_figure(heights, view.plan)
    order = request_order(view.nodes, view.plan.batch_size)
    labels: Labels = []
    forest_panel(forest, view.plan.forest, view.nodes, order, labels)
    _packs(packs, view, order, labels)
    _words(words, view, labels)
    _ctas(shared, view, range(view.tile_set.first_shared, len(view.queues)))
    _ctas(tails, view, range(view.tile_set.first_shared))
    fit(figure, labels)
    return figure


def new_figure(heights: Sequence[float], plan: StepPlan) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each height, in inches, and what the plan reads as its title."""
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + 2.6), dpi=DPI, layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    stats = plan.stats
    figure.suptitle(
        f"{plan.batch_size} requests, {stats.kv_tokens_query_centric:,} KV tokens: "
        f"{stats.kv_tokens_unique:,} unique, {stats.kv_tokens_read:,} read per layer",
        x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold",
    )  # fmt: skip
    return figure, [figure.add_subplot(grid[row]) for row in range(len(heights))]


def save(figure: Figure, file: Path) -> None:
    """Write a PNG whose bytes depend on nothing but the picture."""
    figure.savefig(file, format="png", metadata={"Software": None})


def request_order(nodes: Sequence[NodeView], batch_size: int) -> list[int]:
    """Requests from top to bottom: those below a node stand together."""
    paths: list[list[int]] = [[] for _ in range(batch_size)]
    for i, node in enumerate(nodes):
        for row in node.requests:
            paths[row].append(i)
    return sorted(range(batch_size), key=lambda row: (*paths[row], len(nodes), row))


def forest_panel(
    ax: Axes, forest: Forest, nodes: Sequence[NodeView], order: list[int], labels: Labels
) -> None:
    rows(ax, forest, order, "Forest: what requests share (tokens)")
    place = {row: y for y, row in enumerate(order)}
    for row, y in place.items():
        start, end = int(forest.tail_start[row]), int(forest.seq_lens[row])
        label = f"{end - start}"
        labels += box(ax, start, end, y, 1, PRIVATE, label, ink=MUTED, edge="#c9ced3")
    for i, node in enumerate(nodes):
        top = min(place[row] for row in node.requests)
        label = f"node {i}: {node.end - node.start}"
        height = len(node.requests)
        labels += box(ax, node.start, node.end, top, height, FILL, label, ink=INK, edge=MUTED)


def _packs(ax: Axes, view: PlanView, order: list[int], labels: Labels) -> None:
    rows(ax, view.plan.forest, order, "Packs: what is read together, and its KV splits")
    ax.set_xlabel("KV position", color=MUTED, fontsize=9)
    cuts: dict[int, list[int]] = {}
    for queue in view.queues:
        for item in queue:
            for i, (start, _) in zip(item.packs, item.ranges, strict=True):
                cuts.setdefault(i, []).append(start)
    place = {row: y for y, row in enumerate(order)}
    for i, pack in enumerate(view.packs):
        for top, height in stretches(sorted(place[row] for row in pack.requests)):
            label = f"pack {i}" + (f": {reads(pack)}" if pack.nodes else "")
            labels += box(
                ax, pack.start, pack.end, top, height, colour(view, i), label,
                ink=INK if pack.grows else "white", edge="white",
            )  # fmt: skip
            for cut in sorted(cuts[i])[1:]:
                ax.plot((cut, cut), (top, top + height), color="white", linewidth=0.8, alpha=0.8)


def _words(ax: Axes, view: PlanView, labels: Labels) -> None:
    words = view.plan.words
    starts = {
        "header": 0,
        "segments": words[L.H_SEGMENTS],
        "tails": words[L.H_TAILS],
        "entries": words[L.H_ENTRIES],
        "merges": words[L.H_MERGES],
        "items": words[L.H_QUEUES],
    }
    ends = [*starts.values(), words.size][1:]
    plain(ax, f"Words: the {words.size:,} int32 that the kernels read", words.size)
    ax.set(ylim=(1, 0), xticks=[], yticks=[])
    for i, ((name, start), end) in enumerate(zip(starts.items(), ends, strict=True)):
        fill = FILL if i % 2 else PRIVATE
        labels += box(ax, start, end, 0, 1, fill, f"{name}\n{end - start}", ink=INK, edge=MUTED)


def _ctas(ax: Axes, view: PlanView, tiles: range) -> None:
    """Time on each CTA of one kernel's tiles; every ticket is a bar, in its pack's colour."""
    drawn: list[tuple[Run, tuple[float, ...]]] = []
    names = []
    width, highest = 0, 1.0
    for tile in tiles:
        runs = list(schedule(view, tile))
        for run in runs:
            of_pack = colour(view, view.queues[tile][run.item].packs[0])
            drawn.append((replace(run, cta=width + run.cta), of_pack))
            highest = max(highest, run.end)
        first = [(view.queues[tile][run.item].packs[0], width + run.cta)
                 for run in runs if run.start == 0]  # fmt: skip
        for pack, group in groupby(first, lambda ticket: ticket[0]):
            ctas = [cta for _, cta in group]
            names.append((pack, ctas[0], ctas[-1] + 1))
        width += len(first)
    used = [tile for tile in tiles if view.queues[tile]]
    plain(ax, "; ".join(_queue_title(view, tile) for tile in used) or "no items", max(width, 1))
    bars(ax, drawn)
    for pack, start, end in names:
        if end - start > width / 25:
            ax.text((start + end) / 2, highest * 1.05, f"pack {pack}", ha="center", va="bottom",
                    fontsize=8, color=MUTED)  # fmt: skip
    ax.set_ylim(0, highest * 1.3)
    ax.set_ylabel("time, estimated", color=MUTED, fontsize=9)
    ax.set_yticks([])


def bars(ax: Axes, runs: Sequence[tuple[Run, tuple[float, ...]]]) -> None:
    """A bar of its colour for each run, over its CTA."""
    corners = [
        [(x, run.start), (x, run.end), (x + 0.85, run.end), (x + 0.85, run.start)]
        for run, _ in runs
        for x in [run.cta]
    ]
    ax.add_collection(PolyCollection(corners, facecolors=[colour for _, colour in runs]))


def _queue_title(view: PlanView, tile: int) -> str:
    items, heads = len(view.queues[tile]), view.heads.num_kv_heads
    return (
        f"CTAs of tile {tile_name(view, tile)}: {items} items x {heads} KV heads = "
        f"{items * heads} tickets, {num_ctas(view, tile)} CTAs"
    )


def colour(view: PlanView, pack: int) -> tuple[float, ...]:
    """Of a pack in every panel; tails are paler."""
    rgb = to_rgb(SHARED[pack % len(SHARED)])
    return tuple(1 - 0.4 * (1 - c) for c in rgb) if view.packs[pack].grows else rgb


def rows(ax: Axes, forest: Forest, order: list[int], title: str) -> None:
    """Prepare a panel with a row for each request, over KV positions."""
    plain(ax, title, int(forest.seq_lens.max()))
    ax.set_ylim(len(order), 0)
    step = -(-len(order) // 16)
    ax.set_yticks([y + 0.5 for y in range(0, len(order), step)])
    ax.set_yticklabels([f"request {row}" for row in order[::step]])


def plain(ax: Axes, title: str, width: float) -> None:
    ax.set_title(title, loc="left", fontsize=10, color=INK)
    ax.set_xlim(0, width)
    ax.tick_params(colors=MUTED, labelsize=8, length=0)
    ax.spines[:].set_visible(False)


def box(ax: Axes, start, end, top, height, fill, label, *, ink, edge) -> Labels:
    """A rectangle over [start, end) with its label, which _fit may turn or remove."""
    box = ax.add_patch(Rectangle((start, top), end - start, height, facecolor=fill, edgecolor=edge))
    text = ax.text((start + end) / 2, top + height / 2, label, ha="center", va="center",
                   fontsize=8, color=ink, in_layout=False,
                   bbox={"facecolor": fill, "edgecolor": "none", "pad": 1})  # fmt: skip
    return [(text, box)]


def fit(figure: Figure, labels: Labels) -> None:
    """Keep each label inside its box: along it, else upright, else not at all."""
    figure.draw_without_rendering()
    for text, box in labels:
        space, size = box.get_window_extent(), text.get_window_extent()
        if size.width <= space.width and size.height <= space.height:
            continue
        if size.height <= space.width and size.width <= space.height:
            text.set_rotation(90)
        else:
            text.remove()


def stretches(places: list[int]) -> list[tuple[int, int]]:
    """(first, how many) of each stretch of neighbouring places."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and place == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs
