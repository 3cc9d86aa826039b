"""What the rows say about the policy; pure functions. Times are in microseconds per layer.

Regret is the time of the chosen kernels over the time of the fastest ones, all measured; "stock"
without more words is the fastest of the fallbacks that were measured beside each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import geometric_mean

import numpy as np

from sgl_prefix_attn.records import FLASHINFER
from sgl_prefix_attn.tools.calibrate.fit import log_rms

WORST_REGRET = 1.10
# By which another fallback than FlashInfer must have less regret to be a GPU's.
LESS_REGRET = 0.01
# A batch may be slower than under stock kernels by the larger of a share and microseconds.
SLOWER, SLOWER_UNSHARED = (0.03, 2.0), (0.01, 1.0)
CONFIDENCE = 0.95
# Figures that are geometric means of ratios: only their logarithms are near a normal distribution.
RATIOS = ("regret", "over_stock", "over_prefix")


def chosen_us(row: dict) -> float:
    return row["stock_us"] if row["variant"] == "stock" else row["prefix_us"]


def best_stock_us(row: dict) -> float:
    """Files of earlier versions have one fallback's times alone."""
    return row.get("best_stock_us", row["stock_us"])


def regret(row: dict) -> float:
    return chosen_us(row) / row.get("fastest_us", min(row["stock_us"], row["prefix_us"]))


def is_slower(row: dict, limit: tuple[float, float] = SLOWER) -> bool:
    """Tell whether the choice is slower than stock kernels by more than any batch may be."""
    share, us = limit
    return chosen_us(row) - best_stock_us(row) > max(share * best_stock_us(row), us)


def is_unshared_slower(row: dict) -> bool:
    """Tell whether nothing is shared and the choice is slower by more than it may be then."""
    return row["unique"] == row["tokens"] and is_slower(row, SLOWER_UNSHARED)


def faults(row: dict) -> list[str]:
    """List everything that is wrong with a row's choice, or its error."""
    if row["error"] is not None:
        return [row["error"]]
    found = [f"regret {regret(row):.3f}"] if regret(row) > WORST_REGRET else []
    if is_slower(row) or is_unshared_slower(row):
        found.append(f"{chosen_us(row) - best_stock_us(row):.1f} us slower than stock")
    return found


def summarize(rows: list[dict]) -> dict:
    """Return figures of all measured rows and of each kind of sharing, intervals over seeds, and
    errors of prediction.

    Rows with an error count as failed and nowhere else; without any other row "all" is None.
    """
    measured = [row for row in rows if row["error"] is None]
    return {
        "failed": len(rows) - len(measured),
        "all": figures(measured) if measured else None,
        "over_seeds": over_seeds(list(_by(measured, lambda row: row["seed"]).values())),
        "sharing": _by(measured, lambda row: row["name"].partition("/")[2]),
        "decisions": dict(Counter(f"{row['variant']}:{row['reason']}" for row in measured)),
        "prediction": {
            kernels: {
                "rms": log_rms(
                    np.array([row[f"predicted_{kernels}_us"] for row in measured]),
                    np.array([row[f"{kernels}_us"] for row in measured]),
                )
            }
            for kernels in ("stock", "prefix")
            if measured
        },
    }


def judge_each(rows: list[dict]) -> dict:
    """Return summarize() of the first fallback's rows, and beside it the figures of each, under
    "fallbacks"; those of one without a measured row are left out."""
    names = list(dict.fromkeys(row["fallback"] for row in rows))
    measured = [row for row in rows if row["error"] is None]
    return {
        **summarize([row for row in rows if row["fallback"] == names[0]]),
        "fallbacks": _by(measured, lambda row: row["fallback"]),
    }


def better_fallback(fallbacks: dict[str, dict]) -> str:
    """Name the fallback that servers should have, by the figures of each: FlashInfer, which is
    among them, unless another has less regret by LESS_REGRET."""
    best = min(fallbacks, key=lambda name: fallbacks[name]["regret"])
    most = (1 - LESS_REGRET) * fallbacks[FLASHINFER]["regret"]
    return best if fallbacks[best]["regret"] <= most else FLASHINFER


def figures(rows: list[dict]) -> dict[str, float]:
    """Judge the choices of measured rows, at least one."""
    regrets = [regret(row) for row in rows]
    chosen = [chosen_us(row) for row in rows]
    return {
        "batches": len(rows),
        "prefix_chosen": sum(row["variant"] == "prefix" for row in rows),
        "regret": geometric_mean(regrets),
        "worst": max(regrets),
        "slower": sum(map(is_slower, rows)),
        "unshared_slower": sum(map(is_unshared_slower, rows)),
        "over_stock": geometric_mean(np.divide([row["stock_us"] for row in rows], chosen)),
        "over_prefix": geometric_mean(np.divide([row["prefix_us"] for row in rows], chosen)),
    }


def over_seeds(seeds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the geometric mean of every ratio over seeds and its confidence interval (Student's t
    of the logarithms); empty for fewer than two seeds."""
    if len(seeds) < 2:
        return {}
    from scipy.stats import t

    quantile = t.ppf((1 + CONFIDENCE) / 2, len(seeds) - 1)
    result = {}
    for name in RATIOS:
        logs = np.log([entry[name] for entry in seeds])
        half = quantile * logs.std(ddof=1) / np.sqrt(logs.size)
        ends = {"mean": logs.mean(), "low": logs.mean() - half, "high": logs.mean() + half}
        result[name] = {end: float(np.exp(value)) for end, value in ends.items()}
    return result


def _by(rows: list[dict], key: Callable[[dict], str]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return {name: figures(group) for name, group in groups.items()}
