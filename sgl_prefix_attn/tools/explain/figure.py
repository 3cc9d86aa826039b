"""A plan as a picture: the forest, its tiles over KV positions, the CTAs."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from sgl_prefix_attn.plan.view import PlanView
from sgl_prefix_attn.ranges import stretches

INK, MUTED, FILL, PRIVATE = "#1f2933", "#66727f", "#dbe4ee", "#f4f5f3"
SHARED = ("#2f6db3", "#d4732a", "#3c9a6b", "#a8478f", "#8a6d1f", "#c0404d", "#4c5fb8", "#2a9aa5")
WIDTH_IN, DPI = 12.0, 120


def draw(view: PlanView) -> Figure:
    """Draw a plan; the caller saves or shows the figure."""
    rows_in = min(4.0, 0.6 + 0.27 * view.plan.batch_size)
    heights = (rows_in, rows_in, 1.6)
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + 2.6), dpi=DPI, layout="constrained")
    stats = view.plan.stats
    figure.suptitle(
        f"{view.plan.batch_size} requests, {stats.kv_tokens_query_centric:,} KV tokens: "
        f"{stats.kv_tokens_unique:,} unique, {stats.kv_tokens_read:,} read per layer",
        x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold",
    )  # fmt: skip
    forest, tiles, ctas = figure.subplots(3, 1, height_ratios=heights)
    order = _request_order(view)
    _forest(forest, view, order)
    _tiles(tiles, view, order)
    _ctas(ctas, view)
    _fit_labels(figure)
    return figure


def _request_order(view: PlanView) -> list[int]:
    """The requests from top to bottom: those below a node stand together."""
    paths: list[list[int]] = [[] for _ in range(view.plan.batch_size)]
    for i, node in enumerate(view.nodes):
        for row in node.requests:
            paths[row].append(i)
    return sorted(range(len(paths)), key=lambda row: (*paths[row], len(view.nodes), row))


def _forest(ax: Axes, view: PlanView, order: list[int]) -> None:
    _rows(ax, view, order, "Forest: what requests share (tokens)")
    place = {row: y for y, row in enumerate(order)}
    for row, y in place.items():
        start, end = int(view.forest.tail_start[row]), int(view.forest.seq_lens[row])
        label = f"{end - start}"
        _box(ax, start, end, y, 1, PRIVATE, label, ink=MUTED, edge="#c9ced3")
    for i, node in enumerate(view.nodes):
        top = min(place[row] for row in node.requests)
        label = f"node {i}: {node.end - node.start}"
        height = len(node.requests)
        _box(ax, node.start, node.end, top, height, FILL, label, ink=INK, edge=MUTED)


def _tiles(ax: Axes, view: PlanView, order: list[int]) -> None:
    _rows(ax, view, order, "Tiles: a CTA per KV head reads a colour; pale is masked")
    ax.set_xlabel("KV position", color=MUTED, fontsize=9)
    place = {row: y for y, row in enumerate(order)}
    for i, tile in enumerate(view.tiles):
        parts = f" in {len(tile.parts)} parts" if len(tile.parts) > 1 else ""
        for run in tile.runs:
            for top, height in stretches(sorted(place[row] for row in run.requests)):
                _box(
                    ax, run.start, run.end, top, height, _colour(i, run.unmasked),
                    f"tile {i}{parts}", ink="white" if run.unmasked else INK, edge="white",
                )  # fmt: skip


def _ctas(ax: Axes, view: PlanView) -> None:
    """Time on each CTA; every ticket is a bar, in its tile's colour."""
    items, tickets = view.items, view.tickets
    corners = [
        [(x, one.start), (x, one.end), (x + 0.85, one.end), (x + 0.85, one.start)]
        for one in tickets
        for x in [one.cta]
    ]
    colours = [_colour(items[one.item][0], True) for one in tickets]
    ax.add_collection(PolyCollection(corners, facecolors=colours))
    title = (
        f"CTAs: {len(items)} items x {view.heads.num_kv_heads} KV heads = {len(tickets)} tickets, "
        f"{view.num_sms} CTAs"
    )
    _plain(ax, title, view.num_sms)
    ax.set_ylim(0, 1.1 * max((one.end for one in tickets), default=1.0))
    ax.set_ylabel("us, products alone", color=MUTED, fontsize=9)


def _colour(tile: int, strong: bool) -> tuple[float, ...]:
    rgb = to_rgb(SHARED[tile % len(SHARED)])
    return rgb if strong else tuple(1 - 0.4 * (1 - c) for c in rgb)


def _rows(ax: Axes, view: PlanView, order: list[int], title: str) -> None:
    """Prepare a panel with a row for each request, over KV positions."""
    _plain(ax, title, int(view.forest.seq_lens.max()))
    ax.set_ylim(len(order), 0)
    step = -(-len(order) // 16)
    ax.set_yticks([y + 0.5 for y in range(0, len(order), step)])
    ax.set_yticklabels([f"request {row}" for row in order[::step]])


def _plain(ax: Axes, title: str, width: float) -> None:
    ax.set_title(title, loc="left", fontsize=10, color=INK)
    ax.set_xlim(0, width)
    ax.tick_params(colors=MUTED, labelsize=8, length=0)
    ax.spines[:].set_visible(False)


def _box(ax: Axes, start, end, top, height, fill, label, *, ink, edge) -> None:
    """Draw a rectangle over [start, end) with its label, which _fit_labels may turn or remove."""
    ax.add_patch(Rectangle((start, top), end - start, height, facecolor=fill, edgecolor=edge))
    ax.text((start + end) / 2, top + height / 2, label, ha="center", va="center",
            fontsize=8, color=ink, in_layout=False,
            bbox={"facecolor": fill, "edgecolor": "none", "pad": 1})  # fmt: skip


def _fit_labels(figure: Figure) -> None:
    """Keep each label inside its box: along it, else upright, else not at all."""
    figure.draw_without_rendering()
    every = [pair for ax in figure.axes for pair in zip(ax.texts, ax.patches, strict=True)]
    for text, box in every:
        space, size = box.get_window_extent(), text.get_window_extent()
        if size.width <= space.width and size.height <= space.height:
            continue
        if size.height <= space.width and size.width <= space.height:
            text.set_rotation(90)
        else:
            text.remove()
