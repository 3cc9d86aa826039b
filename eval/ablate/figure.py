"""Bars of the means of time over floor, one panel for each head configuration."""

from __future__ import annotations

from statistics import geometric_mean


def mean_over_floor(rows: list[dict], name: str) -> float:
    """Geometric mean of an ablation's time / floor."""
    return geometric_mean([r["us"] / r["floor_us"] for r in rows if r["ablation"] == name])


def write(rows: list[dict], path: str) -> None:
    """Draw all rows into a file."""
    from matplotlib.figure import Figure

    heads = list(dict.fromkeys(row["heads"] for row in rows))
    figure = Figure(figsize=(8, 5 * len(heads)), layout="constrained")
    for text, panel in zip(heads, figure.subplots(len(heads), 1, squeeze=False)[:, 0], strict=True):
        mine = [row for row in rows if row["heads"] == text]
        names = list(dict.fromkeys(row["ablation"] for row in mine))
        bars = panel.barh(names, [mean_over_floor(mine, name) for name in names])
        panel.bar_label(bars, fmt="%.2f", padding=3)
        panel.invert_yaxis()
        panel.set_xlabel("time / floor, geometric mean")
        panel.set_title(f"{text} heads, {len({row['tree'] for row in mine})} trees")
    figure.savefig(path, dpi=120)
