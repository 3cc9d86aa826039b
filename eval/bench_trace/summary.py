"""Rows of a replay and what they say together; pure functions.

A row is one replay: a backend, a rate, an alternation. The stock backend is that of the first row.
"""

from __future__ import annotations

import statistics

import numpy as np

from eval.bench_trace.trace import Window

METRICS = ("ttft_ms", "tpot_ms")
_QUANTILES = {"median": 50, "p90": 90, "p99": 99}


def row(backend: str, rate: float, alternation: int, window: Window, timed: list[dict]) -> dict:
    """Figures of one replay; `timed` is engine_worker's answer, one for each request.

    Completed is a request with all its tokens; TTFT and TPOT are of those alone. Times in ms, TTFT
    and lateness from the arrival that the trace asks for; `each` has those of every request.
    """
    pairs = list(zip(window.requests, timed, strict=True))
    done = [(request, t) for request, t in pairs if t["tokens"] == request.output]
    ttft = [t["first"] - request.at for request, t in done]
    tpot = [(t["last"] - t["first"]) / (t["tokens"] - 1) for _, t in done if t["tokens"] > 1]
    late = [t["sent"] - request.at for request, t in pairs]
    errors = [t["error"] for t in timed if t["error"]]
    return {
        "backend": backend,
        "rate": rate,
        "alternation": alternation,
        "sent": len(timed),
        "completed": len(done),
        "skipped": window.skipped,
        "input_tokens": sum(request.input for request in window.requests),
        "cached_tokens": sum(t["cached"] for t in timed),
        "output_tokens": sum(request.output for request in window.requests),
        "achieved_rate": len(done) / max(t["last"] for _, t in done) if done else 0.0,
        "ttft_ms": _quantiles(ttft),
        "tpot_ms": _quantiles(tpot),
        "each": {"ttft_ms": _ms(ttft), "tpot_ms": _ms(tpot)},
        "late_ms": _quantiles(late) | {"max": 1e3 * max(late)},
        "error": errors[0] if errors else None,
    }


def summarise(rows: list[dict]) -> list[dict]:
    """One entry for each rate and backend, in the order of the rows.

    sent, completed and cached_share (of the prompt tokens, those from the cache) are over all its
    replays; least_sent is the number of requests of the shortest replay.
    """
    stock = rows[0]["backend"]
    groups: dict[tuple[float, str], list[dict]] = {}
    for entry in rows:
        groups.setdefault((entry["rate"], entry["backend"]), []).append(entry)
    return [
        {
            "rate": rate,
            "backend": backend,
            "alternations": len(group),
            "sent": sum(entry["sent"] for entry in group),
            "completed": sum(entry["completed"] for entry in group),
            "least_sent": min(entry["sent"] for entry in group),
            "cached_share": sum(entry["cached_tokens"] for entry in group)
            / sum(entry["input_tokens"] for entry in group),
            "achieved_rate": statistics.median(entry["achieved_rate"] for entry in group),
            "late_p99_ms": max(entry["late_ms"]["p99"] for entry in group),
            **{
                metric: _against(group, groups.get((rate, stock), []), metric) for metric in METRICS
            },
        }
        for (rate, backend), group in groups.items()
    ]


def text(entry: dict) -> str:
    """Lines about an entry of summarise()."""
    lines = [
        f"{entry['rate']:g} requests/s, {entry['backend']}: {entry['completed']} of "
        f"{entry['sent']} completed in {entry['alternations']} replays, "
        f"{entry['achieved_rate']:.2f} a second; {100 * entry['cached_share']:.1f} % of the prompt "
        f"tokens from the cache; sent late by {entry['late_p99_ms']:.1f} ms (p99)"
    ]
    for metric in METRICS:
        median, p99 = cells(entry[metric])
        lines.append(f"  {metric.removesuffix('_ms').upper()} median {median}, p99 {p99}")
    return "\n".join(lines)


def cells(figures: dict) -> tuple[str, str]:
    """Median and p99 of a metric as text: the ratio to stock, the place in stock's spread."""
    if figures["median"] is None:
        return "-", "-"
    ratio = "" if figures["ratio"] is None else f" ({figures['ratio']:.3f})"
    if figures["stock_p99"] is None:
        return f"{figures['median']:.2f} ms{ratio}", f"{figures['p99']:.1f} ms"
    low, high = figures["stock_p99"]
    return (
        f"{figures['median']:.2f} ms{ratio}",
        f"{figures['p99']:.1f} ms ({figures['p99_is']} {low:.1f} to {high:.1f})",
    )


def _quantiles(seconds: list[float]) -> dict[str, float | None]:
    return {
        name: 1e3 * float(np.percentile(seconds, q)) if seconds else None
        for name, q in _QUANTILES.items()
    }


def _ms(seconds: list[float]) -> list[float]:
    return [round(1e3 * value, 3) for value in seconds]


def _against(group: list[dict], stock: list[dict], metric: str) -> dict:
    """Medians over the alternations, the ratio to stock's, and where p99 lies in its range."""
    median, base = _over(group, metric, "median"), _over(stock, metric, "median")
    p99 = _over(group, metric, "p99")
    spread = _values(stock, metric, "p99")
    known = p99 is not None and bool(spread)
    return {
        "median": median,
        "ratio": None if median is None or base is None else median / base,
        "medians": _values(group, metric, "median"),
        "p99": p99,
        "stock_p99": [min(spread), max(spread)] if spread else None,
        "p99_is": place(p99, min(spread), max(spread)) if known else None,
    }


def place(value: float, low: float, high: float) -> str:
    """Where a value lies against a range: inside (its ends count), below or above."""
    if value < low:
        return "below"
    return "above" if value > high else "inside"


def _values(group: list[dict], metric: str, quantile: str) -> list[float]:
    values = (entry[metric][quantile] for entry in group)
    return [value for value in values if value is not None]


def _over(group: list[dict], metric: str, quantile: str) -> float | None:
    values = _values(group, metric, quantile)
    return statistics.median(values) if values else None
