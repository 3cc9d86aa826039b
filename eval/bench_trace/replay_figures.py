"""Rows of a replay and what they say together; pure functions.

A row is one replay: a backend, a rate, an alternation. The stock backend is that of the first row.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from eval.bench_trace.ratios import ratios
from eval.bench_trace.trace import Request, Window

METRICS = ("ttft_ms", "tpot_ms")
_QUANTILES = {"median": 50, "p90": 90, "p99": 99}


def row(backend: str, rate: float, alternation: int, window: Window, timed: list[dict]) -> dict:
    """Return the figures of one replay; `timed` is engine_worker's answer for each request.

    Completed is a request with all its tokens; TTFT and TPOT are of those alone. Times in ms, TTFT
    and lateness from the arrival that the trace asks for. `each` has those of every request, None
    where it is not completed or, for TPOT, has one token.
    """
    pairs = list(zip(window.requests, timed, strict=True))
    done = [t for request, t in pairs if t["tokens"] == request.output]
    ttft, tpot = zip(*(_times(request, t) for request, t in pairs), strict=True)
    late = [1e3 * (t["sent"] - request.at) for request, t in pairs]
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
        "each": {
            name: [None if ms is None else round(ms, 3) for ms in times]
            for name, times in zip(METRICS, (ttft, tpot), strict=True)
        },
        "late_ms": _quantiles(late) | {"max": max(late)},
        "error": next((t["error"] for t in timed if t["error"]), None),
    }


def summarize(rows: list[dict]) -> list[dict]:
    """Make one entry for each rate and backend, in the order of the rows.

    sent, completed and cached_share (of the prompt tokens, those from the cache) are over all its
    replays; least_sent is the number of requests of the shortest replay.
    """
    stock = rows[0]["backend"]
    groups: dict[tuple[float, str], list[dict]] = defaultdict(list)
    for entry in rows:
        groups[entry["rate"], entry["backend"]].append(entry)
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
            **{m: _against(group, groups.get((rate, stock), []), m) for m in METRICS},
        }
        for (rate, backend), group in groups.items()
    ]


def place(value: float, low: float, high: float) -> str:
    """Say where a value lies against a range: inside (its ends count), below or above."""
    if value < low:
        return "below"
    return "above" if value > high else "inside"


def _times(request: Request, t: dict) -> tuple[float | None, float | None]:
    """Return TTFT and TPOT in ms."""
    if t["tokens"] != request.output:
        return None, None
    ttft = 1e3 * (t["first"] - request.at)
    return ttft, 1e3 * (t["last"] - t["first"]) / (t["tokens"] - 1) if t["tokens"] > 1 else None


def _quantiles(times: Iterable[float | None]) -> dict[str, float | None]:
    known = _known(times)
    return {
        name: float(np.percentile(known, q)) if known else None for name, q in _QUANTILES.items()
    }


def _against(group: list[dict], stock: list[dict], metric: str) -> dict:
    """Put a metric of a backend's replays beside stock's at the same rate.

    median  of all requests of all alternations
    p99     median of the alternations' own, and where it lies in the range of stock's
    ratios  to stock's (see ratios.ratios); None for stock itself, or without its replays
    """
    own, range_ = [_p99s(replays, metric) for replays in (group, stock)]
    each = _known(ms for entry in group for ms in entry["each"][metric])
    p99 = statistics.median(own) if own else None
    ends = [min(range_), max(range_)] if range_ else None
    # [replays, requests], NaN where there is no time
    times = [np.array([e["each"][metric] for e in replays], float) for replays in (group, stock)]
    return {
        "median": statistics.median(each) if each else None,
        "p99": p99,
        "stock_p99": ends,
        "p99_is": place(p99, *ends) if own and ends else None,
        "ratios": ratios(*times) if stock and group is not stock else None,
    }


def _p99s(replays: list[dict], metric: str) -> list[float]:
    return _known(entry[metric]["p99"] for entry in replays)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
