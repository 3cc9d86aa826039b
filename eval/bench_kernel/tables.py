"""Rows of kernel results as Markdown tables."""

from __future__ import annotations

import statistics

from eval.bench_kernel import summary


def kernel_tables(rows: list[dict]) -> str:
    """One table for each head configuration, page size and dtype, with what it does not show."""
    parts = []
    for (heads, head_dim, page_size, dtype), trees in summary.group(rows).items():
        parts.append(
            f"{heads} heads, head dim {head_dim}, {dtype}, page size {page_size}: "
            "microseconds a layer (time / floor)."
        )
        parts.append(_kernel_table(trees))
        parts += [*_spread(trees), *_notes(trees)]
    return "\n\n".join(parts)


def _kernel_table(trees: dict[str, dict[str, dict]]) -> str:
    names = [
        name
        for name in dict.fromkeys(name for rows in trees.values() for name in rows)
        if any(rows.get(name, {}).get("us") is not None for rows in trees.values())
    ]
    lines = header("tree", "floor", *names, "best peer / prefix")
    for tree, rows in trees.items():
        floor = next(iter(rows.values()))["floor_us"]
        ratio = summary.ratio_to_peer(rows, "prefix")
        cells = [_cell(rows.get(name)) for name in names]
        lines.append(
            line(f"`{tree}`", f"{floor:.0f}", *cells, "-" if ratio is None else f"{ratio:.2f}")
        )
    by_name = {entry["provider"]: entry for entry in summary.means(trees)}
    for label, field in (
        ("all", "all"),
        ("with sharing", "sharing"),
        ("trees that all ran", "common"),
    ):
        cells = [_mean_cell(by_name.get(name), field) for name in names]
        lines.append(line(f"geometric mean of time / floor, {label}", "", *cells, ""))
    planning = [_plan_cell(trees, name) for name in names]
    lines.append(line("host planning of one batch, median", "", *planning, ""))
    if "best stock" in by_name:
        stock = by_name["best stock"]
        lines.append(
            f"\nBest stock peer of each tree: {_mean_cell(stock, 'all')} over the floor, "
            f"{_mean_cell(stock, 'sharing')} with sharing."
        )
    return "\n".join(lines)


def _spread(trees: dict[str, dict[str, dict]]) -> list[str]:
    """How far the rounds of one row lie apart; nothing for files that have none."""
    rows = [row for rows in trees.values() for row in rows.values() if row.get("us_rounds")]
    if not rows:
        return []
    spreads = [100 * summary.spread(row) for row in rows]
    return [
        f"Each time is the median of {len(rows[0]['us_rounds'])} rounds in which all took turns; "
        f"slowest less fastest round over it: {statistics.median(spreads):.1f} % in the median, "
        f"at most {max(spreads):.1f} %."
    ]


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


def _notes(trees: dict[str, dict[str, dict]]) -> list[str]:
    """What the table does not show: reasons, eager timings, other page sizes."""
    notes: dict[str, set[str]] = {}
    for rows in trees.values():
        for name, row in rows.items():
            if row["status"] != "ok":
                notes.setdefault(name, set()).add(row["status"])
            if row["timing"] == "eager":
                notes.setdefault(name, set()).add("timed without a CUDA graph")
            if row["run_page_size"]:
                notes.setdefault(name, set()).add(f"run at page size {row['run_page_size']}")
    return (
        ["\n".join(f"- {name}: {'; '.join(sorted(what))}" for name, what in notes.items())]
        if notes
        else []
    )


def header(*columns: str) -> list[str]:
    """The first two lines of a table."""
    return [line(*columns), line(*["---"] * len(columns))]


def line(*cells: str) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
