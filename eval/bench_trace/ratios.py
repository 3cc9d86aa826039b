"""Ratios of one backend's replays to another's, and how well the replays determine them.

Replays of one backend differ too: a few ms decide which requests share a prefill. So each ratio has
a 95 % interval, a bootstrap that draws whole replays of either backend anew.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_DRAWS = 500


class Ratio(NamedTuple):
    """`interval` is of 95 %; None when a backend has a single replay."""

    value: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.3f}"
        low, high = self.interval
        return f"{self.value:.3f} ({low:.3f} to {high:.3f})"


def ratios(ours: np.ndarray, stock: np.ndarray) -> dict[str, Ratio | None]:
    """Compare times [replays, requests], NaN where there is none; None where a ratio is undefined.

    median  of all requests of all replays, ours over stock's
    each    median over the requests of each one's own ratio, of the medians of its replays
    p99     median of the replays' own, ours over stock's
    """
    # A replay of which nothing completed says nothing.
    known = [times[np.isfinite(times).any(axis=1)] for times in (ours, stock)]
    if not all(map(len, known)):
        return {"median": None, "each": None, "p99": None}
    # Drawing replays draws their 99th percentiles.
    p99 = (np.nanpercentile(times, 99, axis=1, keepdims=True) for times in known)
    return {
        "median": _ratio(_median, *known),
        "each": _ratio(_each, *known),
        "p99": _ratio(_median, *p99),
    }


def _median(ours: np.ndarray, stock: np.ndarray) -> float:
    return np.nanmedian(ours) / np.nanmedian(stock)


def _each(ours: np.ndarray, stock: np.ndarray) -> float:
    both = np.isfinite(ours).any(axis=0) & np.isfinite(stock).any(axis=0)
    if not both.any():
        return np.nan
    return np.median(np.nanmedian(ours[:, both], axis=0) / np.nanmedian(stock[:, both], axis=0))


def _ratio(statistic, ours: np.ndarray, stock: np.ndarray) -> Ratio | None:
    value = statistic(ours, stock)
    if not np.isfinite(value):
        return None
    if min(len(ours), len(stock)) < 2:
        return Ratio(float(value), None)
    # numpy's own stream: the pages hold these figures, whatever scipy is installed.
    rng = np.random.default_rng(0)
    drawn = [
        statistic(*(rng.choice(times, len(times)) for times in (ours, stock)))
        for _ in range(_DRAWS)
    ]
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return Ratio(float(value), (float(low), float(high)))
