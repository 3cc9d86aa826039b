"""A plan as text."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from sgl_prefix_attn.plan.view import MOST_ROWS, NodeDecision, PlanView
from sgl_prefix_attn.ranges import in_short


def render(view: PlanView) -> Group:
    """Render forest, tiles, CTAs and totals, to be printed by a rich Console."""
    return Group(_forest(view), Text(), _tiles(view), Text(), _ctas(view), _totals(view))


def _forest(view: PlanView) -> Tree:
    """The nodes below each other, each with its decision where there are any."""
    tree = Tree(f"forest: {view.plan.batch_size} requests, {len(view.nodes)} shared nodes")
    branches: dict[int, Tree] = {-1: tree}
    for i, node in enumerate(view.nodes[:MOST_ROWS]):
        branches[i] = branches[node.parent].add(
            f"node {i}: {node.end - node.start} tokens [dim]{node.start}:{node.end}[/], "
            f"requests {in_short(node.requests)}"
            + (f": {_decision(view.decisions[i])}" if view.decisions else "")
        )
    if len(view.nodes) > MOST_ROWS:
        tree.add(f"... and {len(view.nodes) - MOST_ROWS} more")
    return tree


def _decision(one: NodeDecision) -> str:
    what = "split" if one.split else "merged"
    return f"[bold]{what}[/] ({one.merged_us:.1f} us merged, {one.split_us:.1f} us split)"


def _tiles(view: PlanView) -> Table:
    table = Table(
        "tile", "requests", "rows", "KV tokens", "blocks", "masked", "parts", "us a part",
        title="tiles: requests that one CTA per KV head attends for", title_justify="left",
        box=None, pad_edge=False,
    )  # fmt: skip
    for i, tile in enumerate(view.tiles[:MOST_ROWS]):
        table.add_row(
            str(i),
            in_short(tile.requests),
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


def _ctas(view: PlanView) -> Text:
    tickets = view.tickets
    busy = {ticket.cta: ticket.end for ticket in tickets}
    return Text(
        f"{len(view.items)} items x {view.heads.num_kv_heads} KV heads = {len(tickets)} tickets, "
        f"heaviest first, on {view.num_sms} CTAs: {len(busy)} busy, the busiest for "
        f"{max(busy.values(), default=0.0):.1f} us\n"
    )


def _totals(view: PlanView) -> Text:
    """Say what one layer reads, and what a server would choose."""
    stats, decision = view.plan.stats, view.decision
    ratio = stats.kv_tokens_query_centric / stats.kv_tokens_read
    times, reason, predicted = decision.predicted, decision.reason, ""
    if times:
        predicted = (
            f"predicted per layer: prefix kernels {times.prefix_us:.1f} us, FlashInfer "
            f"{times.stock_us:.1f} us\n"
        )
        if reason == "predicted_slower" and times.prefix_us < times.stock_us:
            gain = times.stock_us / times.prefix_us
            reason += f": a predicted gain of {gain:.2f} is less than the calibration must show"
    return Text(
        f"KV tokens read per layer: {stats.kv_tokens_read}; unique {stats.kv_tokens_unique}; "
        f"one request at a time {stats.kv_tokens_query_centric} ({ratio:.2f}x)\n"
        f"partial results {stats.num_partials}; words {view.plan.words.size}\n"
        f"{predicted}a server would run {decision.variant} kernels ({reason})"
    )
