"""What the rows say about the policy; pure functions. Times are in microseconds per layer.

Regret is the time of the chosen kernels over the time of the faster ones, both measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import geometric_mean

import numpy as np

from sgl_prefix_attn.calibrate.fit import log_rms

WORST_REGRET = 1.10
ABOVE = (1.02, 1.05, WORST_REGRET)
# A batch may be slower than under stock kernels by the larger of a share and microseconds.
SLOWER, SLOWER_UNSHARED = (0.03, 2.0), (0.01, 1.0)
PERCENTILES = (0, 1, 5, 50, 95, 99, 100)
CONFIDENCE = 0.95
# Figures that are geometric means of ratios: only their logarithms are near a normal distribution.
RATIOS = ("regret", "over_stock", "over_prefix", "oracle_over_stock", "oracle_over_prefix")


def chosen_us(row: dict) -> float:
    return row["stock_us"] if row["variant"] == "stock" else row["prefix_us"]


def regret(row: dict) -> float:
    return chosen_us(row) / min(row["stock_us"], row["prefix_us"])


def is_unshared(row: dict) -> bool:
    return row["unique"] == row["tokens"]


def is_slower(row: dict, limit: tuple[float, float] = SLOWER) -> bool:
    """Tell whether the choice is slower than stock kernels by more than any batch may be."""
    share, us = limit
    return chosen_us(row) - row["stock_us"] > max(share * row["stock_us"], us)


def is_unshared_slower(row: dict) -> bool:
    """Tell whether nothing is shared and the choice is slower by more than it may be then."""
    return is_unshared(row) and is_slower(row, SLOWER_UNSHARED)


def faults(row: dict) -> list[str]:
    """List everything that is wrong with a row's choice, or its error."""
    if row["error"] is not None:
        return [row["error"]]
    found = []
    if regret(row) > WORST_REGRET:
        found.append(f"regret {regret(row):.3f}")
    slower = chosen_us(row) - row["stock_us"]
    if is_slower(row) or is_unshared_slower(row):
        found.append(f"{slower:.1f} us slower than stock")
    return found


def summarize(rows: list[dict]) -> dict:
    """Return figures of all measured rows, of each seed and family, intervals, and of prediction.

    Rows with an error count as failed and nowhere else; without any other row "all" is None.
    """
    measured = [row for row in rows if row["error"] is None]
    seeds = _by(measured, lambda row: str(row["seed"]))
    return {
        "failed": len(rows) - len(measured),
        "all": figures(measured) if measured else None,
        "seeds": seeds,
        "over_seeds": over_seeds(list(seeds.values())),
        "shares": shares(measured),
        "families": _by(measured, lambda row: row["name"]),
        "sharing": _by(measured, lambda row: row["name"].partition("/")[2]),
        "decisions": dict(Counter(f"{row['variant']}:{row['reason']}" for row in measured)),
        "prediction": {
            kernels: _quality(
                np.array([row[f"predicted_{kernels}_us"] for row in measured]),
                np.array([row[f"{kernels}_us"] for row in measured]),
            )
            for kernels in ("stock", "prefix")
            if measured
        },
    }


def figures(rows: list[dict]) -> dict[str, float]:
    """Judge the choices of measured rows, at least one."""
    regrets = [regret(row) for row in rows]
    best = [min(row["stock_us"], row["prefix_us"]) for row in rows]
    chosen = [chosen_us(row) for row in rows]
    stock, prefix = ([row[name] for row in rows] for name in ("stock_us", "prefix_us"))
    return {
        "batches": len(rows),
        "prefix_chosen": sum(row["variant"] == "prefix" for row in rows),
        "regret": geometric_mean(regrets),
        "worst": max(regrets),
        **{f"above_{limit:.2f}": float(np.mean(np.array(regrets) > limit)) for limit in ABOVE},
        "slower": sum(map(is_slower, rows)),
        "unshared_slower": sum(map(is_unshared_slower, rows)),
        "over_stock": geometric_mean(np.divide(stock, chosen)),
        "over_prefix": geometric_mean(np.divide(prefix, chosen)),
        "oracle_over_stock": geometric_mean(np.divide(stock, best)),
        "oracle_over_prefix": geometric_mean(np.divide(prefix, best)),
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


def shares(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Count the batches beyond each limit, those that it is for, and give the confidence interval
    of their share (Wilson's: neither below 0 nor empty for none). A limit for no batch is left
    out."""
    from scipy.stats import binomtest

    limits = {f"above_{limit:.2f}": limit for limit in ABOVE}
    beyond = {name: [regret(row) > limit for row in rows] for name, limit in limits.items()}
    beyond["slower"] = [is_slower(row) for row in rows]
    beyond["unshared_slower"] = [is_unshared_slower(row) for row in rows if is_unshared(row)]
    result = {}
    for name, found in beyond.items():
        if found:
            count, of = sum(found), len(found)
            interval = binomtest(count, of).proportion_ci(CONFIDENCE, method="wilson")
            ends = {"low": float(interval.low), "high": float(interval.high)}
            result[name] = {"batches": count, "of": of, **ends}
    return result


def _by(rows: list[dict], key: Callable[[dict], str]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return {name: figures(group) for name, group in groups.items()}


def _quality(predicted: np.ndarray, measured: np.ndarray) -> dict:
    """Return the rms of the logarithm of predicted / measured, and percentiles of the ratio."""
    values = np.percentile(predicted / measured, PERCENTILES)
    return {
        "rms": log_rms(predicted, measured),
        "percentiles": {f"p{p}": float(v) for p, v in zip(PERCENTILES, values, strict=True)},
    }
