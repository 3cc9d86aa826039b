"""Bars of time over floor, one panel for each head configuration and page size."""

from __future__ import annotations

from eval.bench_kernel.over_floor import group


def write(rows: list[dict], path: str) -> None:
    """Draw all rows into a file."""
    from matplotlib.figure import Figure

    groups = group(rows)
    figure = Figure(figsize=(16, 5 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False)
    names = list(dict.fromkeys(row["provider"] for row in rows if row["status"] == "ok"))
    width = 0.8 / max(1, len(names))
    for (key, trees), panel in zip(groups.items(), panels[:, 0], strict=True):
        for i, name in enumerate(names):
            places, heights = [], []
            for j, entry in enumerate(trees.values()):
                if name in entry and entry[name]["status"] == "ok":
                    places.append(j + (i - len(names) / 2) * width)
                    heights.append(entry[name]["us"] / entry[name]["floor_us"])
            panel.bar(places, heights, width, label=name, align="edge", color=f"C{i}")
        heads, head_dim, page_size, dtype = key
        panel.set_title(f"{heads} heads, head dim {head_dim}, page size {page_size}, {dtype}")
        panel.set_ylabel("time / floor")
        panel.set_yscale("log")
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xticks(range(len(trees)), list(trees), rotation=30, ha="right")
        panel.legend(ncols=max(1, len(names)))
    figure.savefig(path, dpi=120)
