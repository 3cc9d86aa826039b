"""The figures that a paper's number is compared with: pure functions of result rows.

Each is made with what it takes from the rows and called with them; "-" where rows are missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean, mean

from eval.bench_kernel.trees import Tree

Figure = Callable[[Sequence[dict]], str]
Case = tuple[str, str]  # batch, heads
MISSING = "-"


def shares(batch: str) -> bool:
    """Say whether a tree has KV that several requests share."""
    return Tree.parse(batch).has_sharing


def is_unshared(batch: str) -> bool:
    return not shares(batch)


def values(rows: Iterable[dict], field: str) -> dict[Case, dict[str, float]]:
    """Return (batch, heads) -> provider -> field, of the rows that have it."""
    found: dict[Case, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.get(field) is not None:
            found[row["batch"], row.get("heads", "")][row["provider"]] = row[field]
    return found


def _ratios(rows, field: str, over: Sequence[str], under: Sequence[str], only) -> list[float]:
    """Return over / under of each case, for every pair of their providers."""
    return [
        by_provider[a] / by_provider[b]
        for (batch, _), by_provider in values(rows, field).items()
        if only is None or only(batch)
        for a in over
        for b in under
        if a in by_provider and b in by_provider
    ]


def _over_ratios(write: Callable[[list[float]], str]):
    def make(over, under=("prefix",), *, only=None, field: str = "us") -> Figure:
        names = [(x,) if isinstance(x, str) else x for x in (over, under)]

        def figure(rows: Sequence[dict]) -> str:
            found = _ratios(rows, field, *names, only)
            return write(found) if found else MISSING

        return figure

    return make


def _span(texts: list[str]) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


# Of time of `over` by time of `under`: the geometric mean, the largest, each in the rows' order,
# from the least to the largest; what `under` takes less, in per cent; what `over` takes more.
ratio_mean = _over_ratios(lambda found: f"{geometric_mean(found):.2f}")
ratio_most = _over_ratios(lambda found: f"{max(found):.1f}")
ratio_each = _over_ratios(lambda found: ", ".join(f"{x:.2f}" for x in found))
ratio_span = _over_ratios(lambda found: _span([f"{x:.2f}" for x in sorted(found)]))
less_span = _over_ratios(lambda found: _span([f"{100 - 100 / x:.1f} %" for x in sorted(found)]))
less_mean = _over_ratios(lambda found: f"{100 * mean(1 - 1 / x for x in found):.1f} %")
more_mean = _over_ratios(lambda found: f"{100 * geometric_mean(found) - 100:.1f} %")


def between(over: tuple[str, str], under: tuple[str, str], scale: float = 1.0) -> Figure:
    """Divide the time of one (batch, provider) by that of another, times `scale`; of experiments
    with one configuration of heads."""

    def figure(rows: Sequence[dict]) -> str:
        times = {(batch, name): us for (batch, _), by in values(rows, "us").items()
                 for name, us in by.items()}  # fmt: skip
        if over not in times or under not in times:
            return MISSING
        return f"{scale * times[over] / times[under]:.2f}"

    return figure


def bandwidth_share(provider: str) -> Figure:
    """Return which share of the floor's bandwidth a provider reaches, from least to most."""

    def figure(rows: Sequence[dict]) -> str:
        times, floors = values(rows, "us"), values(rows, "floor_us")
        found = sorted(floors[case][provider] / by[provider] for case, by in times.items()
                       if provider in by)  # fmt: skip
        return _span([f"{100 * x:.0f} %" for x in found]) if found else MISSING

    return figure


def fact(field: str, provider: str, batch: str, write: Callable[[float], str] = str) -> Figure:
    """Return what a row says."""

    def figure(rows: Sequence[dict]) -> str:
        for (name, _), by_provider in values(rows, field).items():
            if name == batch and provider in by_provider:
                return write(by_provider[provider])
        return MISSING

    return figure


def policy_each() -> Figure:
    """Divide FlashInfer's time by that of the kernels that the server's policy picks, by batch."""

    def figure(rows: Sequence[dict]) -> str:
        runs = values(rows, "server_runs")
        found = [
            by["flashinfer"] / by["prefix"] if runs[case]["prefix"] == "prefix" else 1.0
            for case, by in values(rows, "us").items()
            if {"flashinfer", "prefix"} <= by.keys() and case in runs
        ]
        return ", ".join(f"{x:.2f}" for x in found) or MISSING

    return figure
