"""Runs of servers as a Markdown table."""

from __future__ import annotations

from eval.bench_serving.serving_row import Figure, by_run, latency, median
from eval.markdown import table

# Column, the figure of a row, its format.
_FIGURES: tuple[tuple[str, Figure, str], ...] = (
    ("output tokens/s", lambda row: row["output_tokens_per_s"], ".0f"),
    ("TTFT p50", lambda row: latency(row, "ttft_ms", "p50"), ".0f"),
    ("TPOT p50", lambda row: latency(row, "tpot_ms", "p50"), ".2f"),
    ("TPOT p99", lambda row: latency(row, "tpot_ms", "p99"), ".2f"),
    ("step", lambda row: row.get("step_ms"), ".2f"),
)


def markdown(rows: list[dict], settings: dict) -> str:
    """Tabulate each load at each rate: medians over alternations, and their ratios to those of the
    call's first backend."""
    baseline = settings["baseline"]
    lines = [
        (load, _rate(own[0]), backend,
         *(_cell(own, backends.get(baseline, []), of, form) for _, of, form in _FIGURES),
         *_ends(own))
        for (load, _), backends in by_run(rows).items()
        for backend, own in backends.items()
    ]  # fmt: skip
    columns = ("load", "rate", "backend", *(name for name, _, _ in _FIGURES), "cached",
               "prefix steps", "completed")  # fmt: skip
    return (
        f"Model shape {settings['model_shape']}, at most {settings['max_running']} requests run at "
        f"once. Times in ms, medians over servers; in brackets the ratio to {baseline}.\n\n"
        + table(columns, lines)
    )


def _cell(own: list[dict], base: list[dict], of: Figure, form: str) -> str:
    value, stock = median(own, of), median(base, of)
    if value is None:
        return "-"
    ratio = f" ({value / stock:.3f})" if stock and own is not base else ""
    return f"{value:{form}}{ratio}"


def _ends(own: list[dict]) -> tuple[str, ...]:
    """Say where the prompts came from, what our steps were, and whether all was answered."""
    sent, completed = (sum(row[name] for row in own) for name in ("sent", "completed"))
    prefix = median(own, lambda row: row["prefix_share"])
    return (
        f"{median(own, lambda row: row['cached_share']):.0%}",
        "-" if prefix is None else f"{prefix:.0%}",
        "all" if sent == completed else f"{completed} of {sent}",
    )


def _rate(row: dict) -> str:
    """Write at how many requests/s the load was sent, and what share of the saturation that is."""
    asked = row["asked_requests_per_s"]
    return row["rate"] if asked is None else f"{asked:.3g}/s ({row['rate']})"
