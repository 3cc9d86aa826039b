"""Predicted over measured time of both kernels, and regret over the shared share."""

from __future__ import annotations

from eval.policy_holdout.regret import WORST_REGRET, regret


def write(rows: list[dict], path: str) -> None:
    """Draw the rows without an error into a file."""
    from matplotlib import ticker
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["error"] is None]
    figure = Figure(figsize=(18, 5), layout="constrained")
    panels = figure.subplots(1, 3)
    for kernels, panel in zip(("stock", "prefix"), panels, strict=False):
        for shared, marker in ((False, "x"), (True, ".")):
            some = [row for row in rows if (row["unique"] < row["tokens"]) == shared]
            panel.scatter(
                [row[f"{kernels}_us"] for row in some],
                [row[f"predicted_{kernels}_us"] / row[f"{kernels}_us"] for row in some],
                marker=marker,
                label="shared prefixes" if shared else "nothing shared",
            )
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter(ticker.NullFormatter())
        panel.set_xlabel("measured microseconds per layer")
        panel.set_title(f"{kernels} kernels: predicted / measured")
        panel.axhline(1, color="black", linewidth=0.8)
        panel.legend()
    for variant in ("stock", "prefix"):
        some = [row for row in rows if row["variant"] == variant]
        panels[2].scatter(
            [row["shared_share"] for row in some],
            [regret(row) for row in some],
            marker=".",
            label=f"{variant} chosen",
        )
    panels[2].axhline(WORST_REGRET, color="black", linewidth=0.8)
    panels[2].set_xlabel("shared share of the KV")
    panels[2].set_title("regret: chosen / faster")
    panels[2].legend()
    figure.savefig(path, dpi=120)
