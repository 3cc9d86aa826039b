"""A plan of row tiles as a picture: the forest, its tiles over KV positions, the CTAs."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from sgl_prefix_attn.explain import figure as base
from sgl_prefix_attn.explain.row_tile_view import RowTileView
from sgl_prefix_attn.explain.schedule import in_rounds


def draw(view: RowTileView) -> Figure:
    """Draw a plan; the caller saves or shows the figure."""
    rows_in = min(4.0, 0.6 + 0.27 * view.plan.batch_size)
    figure, (forest, tiles, ctas) = base.new_figure((rows_in, rows_in, 1.6), view.plan)
    order = base.request_order(view.nodes, view.plan.batch_size)
    labels: base.Labels = []
    base.forest_panel(forest, view.forest, view.nodes, order, labels)
    _tiles(tiles, view, order, labels)
    _ctas(ctas, view)
    base.fit(figure, labels)
    return figure


def _tiles(ax: Axes, view: RowTileView, order: list[int], labels: base.Labels) -> None:
    base.rows(ax, view.forest, order, "Row tiles: a CTA per KV head reads a colour; pale is masked")
    ax.set_xlabel("KV position", color=base.MUTED, fontsize=9)
    place = {row: y for y, row in enumerate(order)}
    for i, tile in enumerate(view.tiles):
        for run in tile.runs:
            for top, height in base.stretches(sorted(place[row] for row in run.requests)):
                parts = f" in {len(tile.parts)} parts" if len(tile.parts) > 1 else ""
                labels += base.box(
                    ax, run.start, run.end, top, height, _colour(i, run.unmasked),
                    f"tile {i}{parts}", ink="white" if run.unmasked else base.INK, edge="white",
                )  # fmt: skip


def _ctas(ax: Axes, view: RowTileView) -> None:
    """Time on each CTA; every ticket is a bar, in its tile's colour."""
    items = view.items
    runs = list(in_rounds([part.us for _, part in items], view.heads.num_kv_heads, view.num_sms))
    base.bars(ax, [(run, _colour(items[run.item][0], True)) for run in runs])
    base.plain(
        ax,
        f"CTAs: {len(items)} items x {view.heads.num_kv_heads} KV heads = {len(runs)} tickets, "
        f"{view.num_sms} CTAs",
        view.num_sms,
    )
    ax.set_ylim(0, 1.1 * max((run.end for run in runs), default=1.0))
    ax.set_ylabel("us, products alone", color=base.MUTED, fontsize=9)


def _colour(tile: int, strong: bool) -> tuple[float, ...]:
    rgb = to_rgb(base.SHARED[tile % len(base.SHARED)])
    return rgb if strong else tuple(1 - 0.4 * (1 - c) for c in rgb)
