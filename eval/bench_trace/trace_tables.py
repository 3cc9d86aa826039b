"""Replays of a trace as Markdown tables."""

from __future__ import annotations

from eval.bench_trace.replay_figures import METRICS, summarize
from eval.markdown import table


def markdown(rows: list[dict], trace: str) -> str:
    """Tabulate TTFT and TPOT for each rate and backend, and their ratios to the first backend's.

    trace: name of the file that was replayed."""
    entries = summarize(rows)
    stock = entries[0]["backend"]
    columns = ("TTFT median", "TTFT p99", "TPOT median", "TPOT p99")
    ends = ("prompt cached", "completed", "served/s", "sent late, p99")
    parts = [
        f"`{trace}`, replayed from an empty cache each time: medians over all requests of "
        f"{entries[0]['alternations']} replays; p99 is the median of the replays' own, with its "
        f"place in the range of {stock}'s. {_few_requests(entries)}Prompt cached is the share of "
        "prompt tokens that came from the cache.",
        table(("requests/s", "backend", *columns, *ends), map(_cells, entries)),
    ]
    compared = [entry for entry in entries if entry["ttft_ms"]["ratios"]]
    if compared:
        columns = [f"{m} {what}" for m in ("TTFT", "TPOT") for what in ("median", "each", "p99")]
        cells = (
            (*_place(entry), *(c for metric in METRICS for c in ratio_cells(entry[metric])))
            for entry in compared
        )
        parts += [
            f"Ratios to {stock}'s, with 95 % intervals by drawing the replays anew; each is the "
            "median over the requests of each one's own ratio.",
            table(("requests/s", "backend", *columns), cells),
        ]
    return "\n\n".join(parts)


def metric_cells(figures: dict) -> tuple[str, str]:
    """Format median and p99 of a metric, the latter with its place in the range of stock's."""
    if figures["median"] is None:
        return "-", "-"
    median, p99 = f"{figures['median']:.2f} ms", f"{figures['p99']:.1f} ms"
    if figures["stock_p99"] is None:
        return median, p99
    low, high = figures["stock_p99"]
    return median, f"{p99} ({figures['p99_is']} {low:.1f} to {high:.1f})"


def ratio_cells(figures: dict) -> tuple[str, ...]:
    """Format the ratios to stock of a metric: median, each request's, p99 (see ratios.ratios)."""
    to_stock = figures["ratios"] or {}
    return tuple(str(to_stock.get(name) or "-") for name in ("median", "each", "p99"))


def _place(entry: dict) -> tuple[str, str]:
    return f"{entry['rate']:g}", entry["backend"]


def _cells(entry: dict) -> tuple[str, ...]:
    return (
        *_place(entry),
        *(cell for metric in METRICS for cell in metric_cells(entry[metric])),
        f"{100 * entry['cached_share']:.1f} %",
        f"{entry['completed']} of {entry['sent']}",
        f"{entry['achieved_rate']:.2f}",
        f"{entry['late_p99_ms']:.1f} ms",
    )


def _few_requests(entries: list[dict]) -> str:
    """Say what p99 means where a replay has too few requests for it."""
    few = sorted({entry["least_sent"] for entry in entries if entry["least_sent"] <= 100})
    if not few:
        return ""
    return (
        f"A replay has only {' or '.join(map(str, few))} requests: there p99 lies between the two "
        "slowest of them. "
    )
