"""What the rows say together: ratios to the floor and to the best peer, geometric means."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import geometric_mean

from eval.bench_kernel.trees import Tree

Key = tuple[str, int, int, str]  # heads, head_dim, page_size, dtype
# Providers that SGLang has.
STOCK = ("flashinfer", "fa3", "batchattn", "cascade", "flashmla", "flashinfer:mla")


def group(rows: Iterable[dict]) -> dict[Key, dict[str, dict[str, dict]]]:
    """Return (heads, head_dim, page_size, dtype) -> tree -> provider -> row, in order."""
    groups: dict = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = (row["heads"], row["head_dim"], row["page_size"], row["dtype"])
        groups[key][row["tree"]][row["provider"]] = row
    return groups


def is_ours(provider: str) -> bool:
    return provider.partition(":")[0] == "prefix"


def ours(rows: dict[str, dict]) -> str:
    """Return the first of our providers on one tree: what a server runs stands before variants."""
    return next(filter(is_ours, rows))


def best_us(rows: dict[str, dict], among: Iterable[str]) -> float | None:
    """Return the fastest correct time of the named providers on one tree, None without one."""
    times = [rows[name]["us"] for name in among if name in rows and rows[name]["status"] == "ok"]
    return min(times, default=None)


def ratio_to_peer(rows: dict[str, dict], provider: str) -> float | None:
    """Return the best peer's time over the provider's: above 1, the provider is faster. No peer is
    this library."""
    peers = [name for name in rows if not is_ours(name) and name != provider]
    other = best_us(rows, peers)
    own = best_us(rows, [provider])
    return None if own is None or other is None else other / own


def means(trees: dict[str, dict[str, dict]]) -> list[dict]:
    """Return for each provider, and the best stock peer, the geometric means of time / floor over
    the trees that it ran on, all and those with sharing.

    {"provider", "all", "num_all", "sharing", "num_sharing"}; a number of trees stands beside each
    mean: only means over the same trees compare.
    """
    names = list(dict.fromkeys(name for rows in trees.values() for name in rows))
    over = {name: _over_floor(trees, [name]) for name in names}
    if any(name in STOCK for name in names):
        over["best stock"] = _over_floor(trees, STOCK)
    found = []
    for name, values in over.items():
        sharing = [x for tree, x in values.items() if Tree.parse(tree).has_sharing]
        if values:
            found.append({
                "provider": name, "all": geometric_mean(values.values()), "num_all": len(values),
                "sharing": geometric_mean(sharing) if sharing else None,
                "num_sharing": len(sharing),
            })  # fmt: skip
    return found


def _over_floor(trees: dict[str, dict[str, dict]], among: Iterable[str]) -> dict[str, float]:
    """Return tree -> best time / floor of the named providers, for the trees that one ran on."""
    best = {tree: best_us(rows, among) for tree, rows in trees.items()}
    return {
        tree: us / next(iter(trees[tree].values()))["floor_us"]
        for tree, us in best.items()
        if us is not None
    }


def spread(row: dict) -> float:
    """Return (slowest - fastest) / median of a row's rounds."""
    return (max(row["us_rounds"]) - min(row["us_rounds"])) / row["us"]


def is_eager(row: dict) -> bool:
    """Tell whether it was timed, and without a CUDA graph."""
    return "eager" in (row["timing"] or "")


def text_row(rows: dict[str, dict], row: dict) -> str:
    """Format one line of the running output."""
    head = f"  {row['provider']:<16}"
    if row["status"] != "ok":
        return head + row["status"]
    ratio = ratio_to_peer(rows, row["provider"])
    peer = "" if ratio is None else f"  best peer / this {ratio:5.2f}"
    return (
        f"{head}{row['us']:9.1f} us (spread {100 * spread(row):4.1f} %)  "
        f"floor {row['floor_us']:8.1f}  "
        f"{100 * row['floor_us'] / row['us']:5.1f} % of floor  plan {row['plan_us']:8.1f} us  "
        f"error {row['error']:.1e} (torch {row['error_torch']:.1e}){peer}"
        + (f"  page {row['run_page_size']}" if row["run_page_size"] else "")
        + ("  eager" if is_eager(row) else "")
    )
