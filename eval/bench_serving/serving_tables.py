"""Runs of servers as a Markdown table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from eval.bench_serving.rates import OFFLINE
from eval.bench_serving.serving_row import latency, median
from eval.engine_process import uses_prefix
from eval.markdown import table

Figure = Callable[[dict], float | None]
# Column, the figure of a row, its format.
_FIGURES: tuple[tuple[str, Figure, str], ...] = (
    ("output tokens/s", lambda row: row["output_tokens_per_s"], ".0f"),
    ("requests/s", lambda row: row["requests_per_s"], ".2f"),
    ("TTFT p50", lambda row: latency(row, "ttft_ms", "p50"), ".0f"),
    ("TPOT p50", lambda row: latency(row, "tpot_ms", "p50"), ".2f"),
    ("TPOT p99", lambda row: latency(row, "tpot_ms", "p99"), ".2f"),
)


def markdown(rows: list[dict], settings: dict, baseline: str | None = None) -> str:
    """Tabulate each load at each rate: medians over alternations, and ratios of them.

    baseline  of the ratios; None: the first backend of the call. Raises ValueError if it did not
              run.
    """
    baseline = baseline or settings["baseline"]
    if baseline not in {row["backend"] for row in rows}:
        raise ValueError(f"--baseline {baseline}: the file has no run of it")
    groups: dict[tuple[str, str], dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["load"], row["rate"]][row["backend"]].append(row)
    columns = ("load", "rate", "backend", *(name for name, _, _ in _FIGURES))
    lines = [
        (load, _rate(own[0]), backend, *_cells(own, backends.get(baseline, [])), *_ends(own))
        for (load, _), backends in groups.items()
        for backend, own in backends.items()
    ]
    most = max(len(own) for backends in groups.values() for own in backends.values())
    repeats = f"medians over {most} servers each, with ranges; " if most > 1 else ""
    return (
        f"Model shape {settings['model_shape']}, at most {settings['max_running']} requests run at "
        f"once. Times in ms; {repeats}in brackets the ratio to {baseline}.\n\n"
        + table(
            (*columns, "decode tokens/s", "cached", "prefix steps", "KV read", "completed"), lines
        )
    )


def summary(rows: list[dict], settings: dict) -> str:
    """Tabulate throughput and TPOT of loads that came all at once; ratios of the throughput are to
    the fastest stock backend of the load. Raises ValueError if a load ran on none."""
    loads: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["asked_requests_per_s"] is None:
            load = row["load"] + (f", {OFFLINE}" if row["rate"] == OFFLINE else "")
            loads[load][row["backend"]].append(row)
    names = list(dict.fromkeys(name for load in loads.values() for name in load))
    lines = []
    for load, backends in loads.items():
        rate = {
            b: median(own, lambda row: row["output_tokens_per_s"]) for b, own in backends.items()
        }
        stock = max((rate[b] for b in rate if not uses_prefix(b)), default=None)
        if stock is None:
            raise ValueError(f"{load}: no stock backend has run it")
        tpot = {
            b: median(own, lambda row: latency(row, "tpot_ms", "p50"))
            for b, own in backends.items()
        }
        cells = {
            b: f"{rate[b]:.0f} ({rate[b] / stock:.2f})"
            + ("" if tpot[b] is None else f", {tpot[b]:.1f} ms")
            for b in rate
        }
        lines.append((load, *(cells.get(b, "-") for b in names)))
    return (
        "Output tokens/s with all requests at once, at most "
        f"{settings['max_running']} running, its ratio to the fastest stock backend's, and median "
        "TPOT.\n\n" + table(("load", *names), lines)
    )


def _cells(own: list[dict], base: list[dict]) -> list[str]:
    return [_cell(own, base, of, form) for _, of, form in _FIGURES]


def _cell(own: list[dict], base: list[dict], of: Figure, form: str) -> str:
    """Write a median; the baseline's with its range over alternations, others' with their ratio to
    it and the range of the ratios within one alternation."""
    value, stock = median(own, of), median(base, of)
    if value is None:
        return "-"
    if own is base:
        return f"{value:{form}}{_range(map(of, own), form, ' ({})')}"
    if not stock:
        return f"{value:{form}}"
    by_turn = {row["alternation"]: of(row) for row in base}
    ratios = (of(row) / by_turn[row["alternation"]] for row in own if row["alternation"] in by_turn)
    return f"{value:{form}} ({value / stock:.3f}{_range(ratios, '.3f', ', {}')})"


def _range(values: Iterable[float], form: str, around: str) -> str:
    values = list(values)
    if len(values) < 2:
        return ""
    return around.format(f"{min(values):{form}} to {max(values):{form}}")


def _ends(own: list[dict]) -> tuple[str, ...]:
    """Say where the prompts came from, what our steps were, and whether all was answered."""
    sent, completed = (sum(row[name] for row in own) for name in ("sent", "completed"))
    read, of = (
        sum(row["kv_bytes"].get(kind, 0) for row in own) for kind in ("read", "query_centric")
    )
    prefix = median(own, lambda row: row["prefix_share"])
    decode = median(own, lambda row: row["decode_tokens_per_s"])
    return (
        "-" if decode is None else f"{decode:.0f}",
        f"{median(own, lambda row: row['cached_share']):.0%}",
        "-" if prefix is None else f"{prefix:.0%}",
        f"{read / of:.0%}" if of else "-",
        "all" if sent == completed else f"{completed} of {sent}",
    )


def _rate(row: dict) -> str:
    """Write at how many requests/s the load was sent, and what share of the saturation that is."""
    asked = row["asked_requests_per_s"]
    if asked is None:
        return OFFLINE if row["rate"] == OFFLINE else "all at once"
    return f"{asked:.3g}/s" + (f" ({row['rate']})" if row["rate"].endswith("%") else "")
