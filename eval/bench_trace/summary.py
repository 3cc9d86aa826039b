"""Rows of a replay and what they say together; pure functions.

A row is one replay: a backend, a rate, an alternation. The stock backend is that of the first row.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from eval.bench_trace.ratios import ratios
from eval.bench_trace.trace import Request, Window

METRICS = ("ttft_ms", "tpot_ms")
_QUANTILES = {"median": 50, "p90": 90, "p99": 99}


def row(backend: str, rate: float, alternation: int, window: Window, timed: list[dict]) -> dict:
    """Figures of one replay; `timed` is engine_worker's answer, one for each request.

    Completed is a request with all its tokens; TTFT and TPOT are of those alone. Times in ms, TTFT
    and lateness from the arrival that the trace asks for. `each` has those of every request, None
    where it is not completed or, for TPOT, has one token.
    """
    pairs = list(zip(window.requests, timed, strict=True))
    done = [t for request, t in pairs if t["tokens"] == request.output]
    ttft, tpot = zip(*(_times(request, t) for request, t in pairs), strict=True)
    late = [1e3 * (t["sent"] - request.at) for request, t in pairs]
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
        "achieved_rate": len(done) / max(t["last"] for t in done) if done else 0.0,
        "ttft_ms": _quantiles(ttft),
        "tpot_ms": _quantiles(tpot),
        "each": {"ttft_ms": _rounded(ttft), "tpot_ms": _rounded(tpot)},
        "late_ms": _quantiles(late) | {"max": max(late)},
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
        name = metric.removesuffix("_ms").upper()
        median, p99 = cells(entry[metric])
        lines.append(f"  {name} median {median}, p99 {p99}")
        if entry[metric]["ratios"]:
            median, each, p99 = ratio_cells(entry[metric])
            lines.append(f"  {name} ratios: median {median}, each request's {each}, p99 {p99}")
    return "\n".join(lines)


def cells(figures: dict) -> tuple[str, str]:
    """Median and p99 of a metric as text, the latter with its place in the range of stock's."""
    if figures["median"] is None:
        return "-", "-"
    median, p99 = f"{figures['median']:.2f} ms", f"{figures['p99']:.1f} ms"
    if figures["stock_p99"] is None:
        return median, p99
    low, high = figures["stock_p99"]
    return median, f"{p99} ({figures['p99_is']} {low:.1f} to {high:.1f})"


def ratio_cells(figures: dict) -> tuple[str, str, str]:
    """The ratios to stock of a metric as text: median, each request's, p99 (see ratios.ratios)."""
    to_stock = figures["ratios"] or {}
    return tuple(str(to_stock.get(name) or "-") for name in ("median", "each", "p99"))


def _times(request: Request, t: dict) -> tuple[float | None, float | None]:
    """TTFT and TPOT in ms."""
    if t["tokens"] != request.output:
        return None, None
    ttft = 1e3 * (t["first"] - request.at)
    return ttft, 1e3 * (t["last"] - t["first"]) / (t["tokens"] - 1) if t["tokens"] > 1 else None


def _quantiles(times: Sequence[float | None]) -> dict[str, float | None]:
    known = _known(times)
    return {
        name: float(np.percentile(known, q)) if known else None for name, q in _QUANTILES.items()
    }


def _rounded(times: Sequence[float | None]) -> list[float | None]:
    return [None if ms is None else round(ms, 3) for ms in times]


def _against(group: list[dict], stock: list[dict], metric: str) -> dict:
    """A metric of a backend's replays beside stock's at the same rate.

    median  of all requests of all alternations
    p99     median of the alternations' own, and where it lies in the range of stock's
    ratios  to stock's (see ratios.ratios); None for stock itself, or without its replays
    """
    p99, spread = _over(group, metric, "p99"), _values(stock, metric, "p99")
    known = p99 is not None and bool(spread)
    compared = bool(stock) and group is not stock
    return {
        "median": _median([ms for entry in group for ms in entry["each"][metric]]),
        "p99": p99,
        "stock_p99": [min(spread), max(spread)] if spread else None,
        "p99_is": place(p99, min(spread), max(spread)) if known else None,
        "ratios": ratios(_of_each(group, metric), _of_each(stock, metric)) if compared else None,
    }


def _of_each(group: list[dict], metric: str) -> np.ndarray:
    """[replays, requests], NaN where there is none."""
    return np.array([entry["each"][metric] for entry in group], dtype=float)


def place(value: float, low: float, high: float) -> str:
    """Where a value lies against a range: inside (its ends count), below or above."""
    if value < low:
        return "below"
    return "above" if value > high else "inside"


def _values(group: list[dict], metric: str, quantile: str) -> list[float]:
    return _known([entry[metric][quantile] for entry in group])


def _over(group: list[dict], metric: str, quantile: str) -> float | None:
    return _median(_values(group, metric, quantile))


def _median(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
