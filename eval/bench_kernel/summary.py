"""What the rows say together: ratios to the floor and to the best peer, geometric means."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from eval.bench_kernel.providers import STOCK
from eval.bench_kernel.trees import parse_tree

Key = tuple[str, int, int, str]  # heads, head_dim, page_size, dtype


def group(rows: Iterable[dict]) -> dict[Key, dict[str, dict[str, dict]]]:
    """(heads, head_dim, page_size, dtype) -> tree -> provider -> row, in the rows' order."""
    groups: dict = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = (row["heads"], row["head_dim"], row["page_size"], row["dtype"])
        groups[key][row["tree"]][row["provider"]] = row
    return groups


def is_ours(provider: str) -> bool:
    return provider.partition(":")[0] == "prefix"


def best_us(rows: dict[str, dict], among: Iterable[str]) -> float | None:
    """Fastest correct time of the named providers on one tree, None if there is none."""
    times = [rows[name]["us"] for name in among if name in rows and rows[name]["status"] == "ok"]
    return min(times, default=None)


def peers(rows: dict[str, dict]) -> list[str]:
    """Providers that are neither this library nor plain torch."""
    return [name for name in rows if not is_ours(name) and name != "torch"]


def ratio_to_peer(rows: dict[str, dict], provider: str) -> float | None:
    """Best peer's time over the provider's: above 1, the provider is faster."""
    other = best_us(rows, [name for name in peers(rows) if name != provider])
    own = best_us(rows, [provider])
    return None if own is None or other is None else other / own


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def means(trees: dict[str, dict[str, dict]]) -> list[dict]:
    """Per provider (and the best stock peer) the geometric mean of time / floor.

    {"provider", "all", "num_all", "sharing", "num_sharing"}; the number of trees that it ran on
    stands beside each mean: means over different trees do not compare.
    """
    names = list(dict.fromkeys(name for rows in trees.values() for name in rows))
    result = [_mean(name, trees, [name]) for name in names]
    if any(name in STOCK for name in names):
        result.append(_mean("best stock", trees, list(STOCK)))
    return [entry for entry in result if entry["num_all"]]


def _mean(label: str, trees: dict[str, dict[str, dict]], among: list[str]) -> dict:
    over_floor: dict[str, float] = {}
    for tree, rows in trees.items():
        us = best_us(rows, among)
        if us is not None:
            over_floor[tree] = us / next(iter(rows.values()))["floor_us"]
    sharing = [value for tree, value in over_floor.items() if parse_tree(tree).has_sharing]
    return {
        "provider": label,
        "all": geometric_mean(list(over_floor.values())) if over_floor else None,
        "num_all": len(over_floor),
        "sharing": geometric_mean(sharing) if sharing else None,
        "num_sharing": len(sharing),
    }


def slower_than_stock(trees: dict[str, dict[str, dict]], provider: str = "prefix") -> list[str]:
    """Trees with sharing on which the provider is slower than the best stock peer."""
    slower = []
    for tree, rows in trees.items():
        own, stock = best_us(rows, [provider]), best_us(rows, STOCK)
        if parse_tree(tree).has_sharing and own is not None and stock is not None and own > stock:
            slower.append(tree)
    return slower


def text_row(rows: dict[str, dict], row: dict) -> str:
    """One line of the running output."""
    head = f"  {row['provider']:<16}"
    if row["status"] != "ok":
        return head + row["status"]
    ratio = ratio_to_peer(rows, row["provider"])
    peer = "" if ratio is None else f"  best peer / this {ratio:5.2f}"
    return (
        f"{head}{row['us']:9.1f} us  floor {row['floor_us']:8.1f}  "
        f"{100 * row['floor_us'] / row['us']:5.1f} % of floor  plan {row['plan_us']:8.1f} us  "
        f"error {row['error']:.1e} (torch {row['error_torch']:.1e}){peer}"
        + (f"  page {row['run_page_size']}" if row["run_page_size"] else "")
        + ("  eager" if row["timing"] == "eager" else "")
    )


def text_means(trees: dict[str, dict[str, dict]]) -> str:
    lines = ["geometric mean of time / floor (trees)"]
    for entry in means(trees):
        sharing = "-" if entry["sharing"] is None else f"{entry['sharing']:.2f}"
        lines.append(
            f"  {entry['provider']:<16} all {entry['all']:6.2f} ({entry['num_all']})   "
            f"with sharing {sharing:>6} ({entry['num_sharing']})"
        )
    slower = slower_than_stock(trees)
    if slower:
        lines.append(f"  slower than the best stock peer with sharing: {', '.join(slower)}")
    return "\n".join(lines)
