"""A plan of row tiles as text."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sgl_prefix_attn.explain.row_tile_view import RowTileView
from sgl_prefix_attn.explain.schedule import in_rounds
from sgl_prefix_attn.explain.text import MOST_ROWS, forest_tree, request_list, totals


def render(view: RowTileView) -> Group:
    """Forest, tiles, CTAs and totals, to be printed by a rich Console."""
    return Group(
        forest_tree(view.nodes, view.plan.batch_size), Text(), _tiles(view), Text(), _ctas(view),
        totals(view.plan, view.decision, "row tiles"),
    )  # fmt: skip


def _tiles(view: RowTileView) -> Table:
    table = Table(
        "tile", "requests", "rows", "KV tokens", "blocks", "masked", "parts", "us a part",
        title="row tiles: requests that one CTA per KV head attends for", title_justify="left",
        box=None, pad_edge=False,
    )  # fmt: skip
    for i, tile in enumerate(view.tiles[:MOST_ROWS]):
        table.add_row(
            str(i),
            request_list(tile.requests),
            f"{len(tile.requests)} x {view.heads.group_size} heads",
            str(tile.tokens),
            str(tile.unmasked + tile.masked),
            str(tile.masked),
            str(len(tile.parts)),
            f"{max(part.us for part in tile.parts):.1f}",
        )
    if len(view.tiles) > MOST_ROWS:
        table.add_row("...", f"{len(view.tiles) - MOST_ROWS} more")
    return table


def _ctas(view: RowTileView) -> Text:
    runs = list(
        in_rounds([part.us for _, part in view.items], view.heads.num_kv_heads, view.num_sms)
    )
    busy = {run.cta: run.end for run in runs}
    return Text(
        f"{len(view.items)} items x {view.heads.num_kv_heads} KV heads = {len(runs)} tickets, "
        f"heaviest first, on {view.num_sms} CTAs: {len(busy)} busy, the busiest for "
        f"{max(busy.values(), default=0.0):.1f} us\n"
    )
