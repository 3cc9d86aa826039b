"""The figures that a paper's number is compared with: pure functions of result rows.

Each is made with what it takes from the rows and called with them; "-" where rows are missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def _figure(write: Callable[[list], str]):
    """Make a maker of figures from a function that finds numbers in rows: what the function takes
    besides rows, the maker takes."""

    def decorate(find: Callable[..., Iterable]):
        def make(*args, **more) -> Figure:
            def figure(rows: Sequence[dict]) -> str:
                found = list(find(rows, *args, **more))
                return write(found) if found else MISSING

            return figure

        return make

    return decorate


def _ratios(rows, over, under=("prefix",), *, only=None, field: str = "us") -> Iterator[float]:
    """Yield over / under of each batch that is like `only`, for every pair of their providers."""
    overs = (over,) if isinstance(over, str) else over
    for (batch, _), by in values(rows, field).items():
        if only is None or only(batch):
            yield from (by[a] / by[b] for a in overs for b in under if {a, b} <= by.keys())


def _each(found: list[float]) -> str:
    return ", ".join(f"{x:.2f}" for x in found)


def _span(form: str, found: list[float]) -> str:
    texts = [form.format(x) for x in sorted(found)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


# Of time of `over` by time of `under`: the geometric mean, the largest, each in the rows' order,
# from the least to the largest; what `under` takes less, in per cent; what `over` takes more.
ratio_mean = _figure(lambda found: f"{geometric_mean(found):.2f}")(_ratios)
ratio_most = _figure(lambda found: f"{max(found):.1f}")(_ratios)
ratio_each = _figure(_each)(_ratios)
ratio_span = _figure(lambda found: _span("{:.2f}", found))(_ratios)
less_span = _figure(lambda found: _span("{:.1f} %", [100 - 100 / x for x in found]))(_ratios)
less_mean = _figure(lambda found: f"{100 * mean(1 - 1 / x for x in found):.1f} %")(_ratios)
more_mean = _figure(lambda found: f"{100 * geometric_mean(found) - 100:.1f} %")(_ratios)


@_figure(_each)
def between(rows, over: tuple[str, str], under: tuple[str, str], scale: float = 1.0):
    """Divide the time of one (batch, provider) by that of another, times `scale`; of experiments
    with one configuration of heads."""
    times = {(row["batch"], row["provider"]): row.get("us") for row in rows}
    return [scale * times[over] / times[under]] if times.get(over) and times.get(under) else []


@_figure(lambda found: _span("{:.0f} %", found))
def bandwidth_share(rows, provider: str):
    """Return which share of the floor's bandwidth a provider reaches, from least to most."""
    own = (row for row in rows if row["provider"] == provider and row.get("us"))
    return [100 * row["floor_us"] / row["us"] for row in own]


@_figure("".join)
def fact(rows, field: str, provider: str, batch: str, write: Callable[[float], str] = str):
    """Return what a row says."""
    named = (row for row in rows if (row["batch"], row["provider"]) == (batch, provider))
    return [write(row[field]) for row in named if row.get(field) is not None][:1]


@_figure(_each)
def policy_each(rows):
    """Divide FlashInfer's time by that of the kernels that the server's policy picks, by batch."""
    runs = values(rows, "server_runs")
    for case, by in values(rows, "us").items():
        if {"flashinfer", "prefix"} <= by.keys() and case in runs:
            picks_ours = runs[case]["prefix"] == "prefix"
            yield by["flashinfer"] / by["prefix"] if picks_ours else 1.0
