"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree

from sgl_prefix_attn.explain.schedule import num_ctas, schedule
from sgl_prefix_attn.explain.view import NodeView, PackView, PlanView
from sgl_prefix_attn.records import Decision, StepPlan

MOST_ROWS = 24  # of a table; a plan of a large batch has thousands of packs


def render(view: PlanView) -> Group:
    """Forest, packs, queues and totals, to be printed by a rich Console."""
    return Group(
        forest_tree(view.nodes, view.plan.batch_size), Text(), _packs(view), Text(), _queues(view),
        Text(), totals(view.plan, view.decision, "packs"),
    )  # fmt: skip


def request_list(requests: Iterable[int]) -> str:
    """`0-2, 5` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for row in sorted(requests):
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def tile_name(view: PlanView, tile: int) -> str:
    config = view.tile_set.tiles[tile]
    kind = {0: "shared", 1: "tails"}.get(config.requests, "packed tails")
    return f"{kind} {config.block_m}x{config.block_n}"


def forest_tree(nodes: Sequence[NodeView], batch_size: int) -> Tree:
    tree = Tree(f"forest: {batch_size} requests, {len(nodes)} shared nodes")
    branches: dict[int, Tree] = {-1: tree}
    for i, node in enumerate(nodes[:MOST_ROWS]):
        branches[i] = branches[node.parent].add(
            f"node {i}: {node.end - node.start} tokens [dim]{node.start}:{node.end}[/], "
            f"requests {request_list(node.requests)}"
        )
    if len(nodes) > MOST_ROWS:
        tree.add(f"... and {len(nodes) - MOST_ROWS} more")
    return tree


def _packs(view: PlanView) -> Table:
    group = view.heads.group_size
    table = Table(
        "pack", "requests", "KV positions", "tokens", "reads", "rows", "splits",
        title="packs: requests that read KV together", title_justify="left",
        box=None, pad_edge=False,
    )  # fmt: skip
    splits = {p: i.num_splits for queue in view.queues for i in queue for p in i.packs}
    for i, pack in enumerate(view.packs[:MOST_ROWS]):
        table.add_row(
            str(i),
            request_list(pack.requests),
            f"{pack.start}:{pack.end}",
            str(pack.tokens),
            reads(pack),
            f"{len(pack.requests)} x {group} heads",
            str(splits[i]),
        )
    if len(view.packs) > MOST_ROWS:
        table.add_row("...", f"{len(view.packs) - MOST_ROWS} more")
    return table


def reads(pack: PackView) -> str:
    """What a pack covers: `node 1`, `nodes 1+2`, `node 0 + tail`, `tail`."""
    name = "node" if len(pack.nodes) == 1 else "nodes"
    nodes = f"{name} {'+'.join(map(str, pack.nodes))}" if pack.nodes else ""
    return " + ".join(filter(None, (nodes, "tail" if pack.grows else "")))


def _queues(view: PlanView) -> Table:
    table = Table(
        Column("tile", no_wrap=True), "items", "KV heads", "tickets", "CTAs", "busy", "most on one",
        "longest item",
        title="work queues: one per tile; a free CTA takes the next ticket", title_justify="left",
        box=None, pad_edge=False,
    )  # fmt: skip
    for tile, queue in enumerate(view.queues):
        runs = list(schedule(view, tile))
        per_cta: dict[int, int] = {}
        for run in runs:
            per_cta[run.cta] = per_cta.get(run.cta, 0) + 1
        table.add_row(
            tile_name(view, tile),
            str(len(queue)),
            str(view.heads.num_kv_heads),
            str(len(runs)),
            str(num_ctas(view, tile)),
            str(len(per_cta)),
            str(max(per_cta.values(), default=0)),
            f"{max((item.tokens for item in queue), default=0)} tokens",
        )
    return table


def totals(plan: StepPlan, decision: Decision, kernels: str) -> Text:
    """What one layer reads, and what a server that runs `kernels` would choose."""
    stats = plan.stats
    ratio = stats.kv_tokens_query_centric / stats.kv_tokens_read
    chosen = f"a server that runs {kernels} would run {decision.variant} kernels"
    times, reason = decision.predicted, decision.reason
    if times and reason == "predicted_slower" and times.prefix_us < times.stock_us:
        gain = times.stock_us / times.prefix_us
        reason = f"{reason}: a predicted gain of {gain:.2f} is less than the calibration must show"
    predicted = (
        f"predicted per layer: prefix kernels {times.prefix_us:.1f} us, FlashInfer "
        f"{times.stock_us:.1f} us\n"
        if times
        else ""
    )
    return Text(
        f"KV tokens read per layer: {stats.kv_tokens_read}; unique {stats.kv_tokens_unique}; "
        f"one request at a time {stats.kv_tokens_query_centric} ({ratio:.2f}x)\n"
        f"partial results {stats.num_partials}; words {plan.words.size}\n"
        f"{predicted}{chosen} ({reason})"
    )
