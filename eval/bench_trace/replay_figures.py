"""Rows of a replay and what they say together; pure functions.

A row is one replay: a backend, a rate, an alternation. The stock backend is that of the first row.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from eval.bench_trace.trace import Window
from eval.markdown import table
from eval.workloads.load import Request

METRICS = ("ttft_ms", "tpot_ms")
_QUANTILES = {"median": 50, "p90": 90, "p99": 99}
_DRAWS = 500


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
    """Make one entry for each rate and backend, in the order of the rows: of all its replays the
    share of prompt tokens from the cache, and of either metric the median over all requests and
    the ratio to stock's (see `ratio`), None of stock itself or without its replays."""
    stock = rows[0]["backend"]
    groups: dict[tuple[float, str], list[dict]] = defaultdict(list)
    for entry in rows:
        groups[entry["rate"], entry["backend"]].append(entry)
    entries = []
    for (rate, backend), group in groups.items():
        cached, inputs = (sum(e[name] for e in group) for name in ("cached_tokens", "input_tokens"))
        entry = {"rate": rate, "backend": backend, "cached_share": cached / inputs}
        entry |= {name: sum(e[name] for e in group) for name in ("sent", "completed")}
        against = groups.get((rate, stock), []) if backend != stock else []
        for metric in METRICS:
            own, base = ([e["each"][metric] for e in replays] for replays in (group, against))
            known = [ms for times in own for ms in times if ms is not None]
            entry[metric] = {
                "median": statistics.median(known) if known else None,
                # [replays, requests], NaN where there is no time
                "ratio": ratio(np.array(own, float), np.array(base, float)) if base else None,
            }
        entries.append(entry)
    return entries


class Ratio(NamedTuple):
    """`interval` is of 95 %; None when a backend has a single replay."""

    value: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.3f}"
        low, high = self.interval
        return f"{self.value:.3f} ({low:.3f} to {high:.3f})"


def ratio(ours: np.ndarray, stock: np.ndarray) -> Ratio | None:
    """Compare times [replays, requests], NaN where there is none: the median over the requests of
    each one's own ratio, of the medians of its replays; None where no request has one.

    Replays of one backend differ too: a few ms decide which requests share a prefill. So the ratio
    has a 95 % interval, a bootstrap that draws whole replays of either backend anew.
    """
    # A replay of which nothing completed says nothing.
    known = [times[np.isfinite(times).any(axis=1)] for times in (ours, stock)]
    if not all(map(len, known)) or not np.isfinite(value := _each(*known)):
        return None
    if min(map(len, known)) < 2:
        return Ratio(float(value), None)
    # numpy's own stream: the pages hold these figures, whatever scipy is installed.
    rng = np.random.default_rng(0)
    drawn = [_each(*(rng.choice(times, len(times)) for times in known)) for _ in range(_DRAWS)]
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return Ratio(float(value), (float(low), float(high)))


def markdown(rows: list[dict]) -> str:
    """Tabulate medians and ratios of each rate and backend."""
    columns = ("requests/s", "backend", "TTFT median, ms", "TPOT median, ms", "ratio of TTFT",
               "ratio of TPOT", "prompt cached", "completed")  # fmt: skip
    lines = []
    for entry in summarize(rows):
        medians = (entry[metric]["median"] for metric in METRICS)
        ratios = (entry[metric]["ratio"] for metric in METRICS)
        lines.append((f"{entry['rate']:g}", entry["backend"],
                      *("-" if ms is None else f"{ms:.2f}" for ms in medians),
                      *(str(found or "-") for found in ratios),
                      f"{100 * entry['cached_share']:.1f} %",
                      f"{entry['completed']} of {entry['sent']}"))  # fmt: skip
    return (
        f"{table(columns, lines)}\n\nRatios to {rows[0]['backend']}'s: the median over requests of "
        "each one's own, with 95 % intervals by drawing the replays anew."
    )


def _each(ours: np.ndarray, stock: np.ndarray) -> float:
    both = np.isfinite(ours).any(axis=0) & np.isfinite(stock).any(axis=0)
    if not both.any():
        return np.nan
    return np.median(np.nanmedian(ours[:, both], axis=0) / np.nanmedian(stock[:, both], axis=0))


def _times(request: Request, t: dict) -> tuple[float | None, float | None]:
    """Return TTFT and TPOT in ms."""
    if t["tokens"] != request.output:
        return None, None
    ttft = 1e3 * (t["first"] - request.at)
    return ttft, 1e3 * (t["last"] - t["first"]) / (t["tokens"] - 1) if t["tokens"] > 1 else None


def _quantiles(times: Iterable[float | None]) -> dict[str, float | None]:
    known = [ms for ms in times if ms is not None]
    return {
        name: float(np.percentile(known, q)) if known else None for name, q in _QUANTILES.items()
    }
