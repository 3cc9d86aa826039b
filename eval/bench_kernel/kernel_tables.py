"""Rows of kernel results as Markdown tables."""

from __future__ import annotations

import statistics
from collections import defaultdict

from eval.bench_kernel import over_floor
from eval.markdown import table


def markdown(rows: list[dict]) -> str:
    """Make a table for each head configuration, page size and dtype, with what it does not show."""
    parts = []
    for (heads, head_dim, page_size, dtype), trees in over_floor.group(rows).items():
        parts.append(
            f"{heads} heads, head dim {head_dim}, {dtype}, page size {page_size}: "
            "microseconds per layer (time / floor)."
        )
        parts += [_kernel_table(trees), _notes(trees)]
    return "\n\n".join(part for part in parts if part)


def _kernel_table(trees: dict[str, dict[str, dict]]) -> str:
    names = [
        name
        for name in dict.fromkeys(name for rows in trees.values() for name in rows)
        if any(name in rows and rows[name]["us"] is not None for rows in trees.values())
    ]
    lines = []
    for tree, rows in trees.items():
        floor = next(iter(rows.values()))["floor_us"]
        ratio = over_floor.ratio_to_peer(rows, "prefix")
        cells = [_cell(rows.get(name)) for name in names]
        lines.append(
            (f"`{tree}`", f"{floor:.0f}", *cells, "-" if ratio is None else f"{ratio:.2f}")
        )
    by_name = {entry["provider"]: entry for entry in over_floor.means(trees)}
    for field, label in (("all", "all"), ("sharing", "with sharing")):
        cells = [_mean_cell(by_name.get(name), field) for name in names]
        lines.append((f"geometric mean of time / floor, {label}", "", *cells, ""))
    planning = [_plan_cell(trees, name) for name in names]
    lines.append(("host planning of one batch, median", "", *planning, ""))
    text = table(("tree", "floor", *names, "best peer / prefix"), lines)
    if stock := by_name.get("best stock"):
        text += (
            f"\n\nBest stock peer of each tree: {_mean_cell(stock, 'all')} over the floor, "
            f"{_mean_cell(stock, 'sharing')} with sharing."
        )
    return text


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    if row["us"] is None:
        return row["status"].partition(":")[0]
    return f"{row['us']:.1f} ({row['us'] / row['floor_us']:.2f})"


def _mean_cell(entry: dict | None, field: str) -> str:
    if entry is None or entry[field] is None:
        return "-"
    return f"{entry[field]:.2f} ({entry['num_' + field]} trees)"


def _plan_cell(trees: dict[str, dict[str, dict]], name: str) -> str:
    times = [rows[name]["plan_us"] for rows in trees.values() if name in rows]
    times = [us for us in times if us is not None]
    return f"{statistics.median(times):.0f} us" if times else "-"


def _notes(trees: dict[str, dict[str, dict]]) -> str:
    """Say what the table does not show: reasons, eager timings, other page sizes."""
    notes: dict[str, set[str]] = defaultdict(set)
    for rows in trees.values():
        for name, row in rows.items():
            if row["status"] != "ok":
                notes[name].add(row["status"])
            if over_floor.is_eager(row):
                notes[name].add("timed without a CUDA graph")
            if row["run_page_size"]:
                notes[name].add(f"run at page size {row['run_page_size']}")
    return "\n".join(f"- {name}: {'; '.join(sorted(what))}" for name, what in notes.items())
