"""Fits the fallback's coefficients and the kernels' rates to measured batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from sgl_prefix_attn.plan.kernel_rates import KernelRates
from sgl_prefix_attn.predict.stock_time import (
    STOCK_COEFFICIENTS,
    KvCosts,
    StockWork,
    stock_physical,
)

_FOLDS = 5
# A rate that is off by a factor of e costs as much as every sample off by _PULL / sqrt(samples):
# what the samples do not tell apart stays where it was.
_PULL = 0.5
Model = TypeVar("Model")
Prediction = TypeVar("Prediction")


def fit_stock(
    works: Sequence[StockWork], us: np.ndarray, costs: KvCosts, start: Mapping[str, float]
) -> dict[str, float]:
    """Return the named coefficients with which `works` take `us` [n], as nearly as can be."""
    names, _, low, high = zip(*STOCK_COEFFICIENTS, strict=True)
    target = np.log(us)

    def residuals(c) -> np.ndarray:
        predicted = np.array([stock_physical(c, work, costs) for work in works])
        # A coefficient may be negative on the way: such a time is as bad as a tiny one.
        return np.log(np.maximum(predicted, 1e-3)) - target

    found = _least_squares(residuals, [start[name] for name in names], bounds=(low, high))
    return dict(zip(names, found.tolist(), strict=True))


def fit_rates(
    predict: Callable[[KernelRates], np.ndarray], us: np.ndarray, start: KernelRates
) -> KernelRates:
    """Return the rates by which `predict` comes nearest to `us` [n], in logarithms; _PULL keeps
    them near `start`."""
    kind, first = type(start), np.array(list(vars(start).values()))
    target = np.log(us)

    def residuals(factors) -> np.ndarray:
        rates = kind(*(first * np.exp(factors)).tolist())
        return np.concatenate([np.log(predict(rates)) - target, _PULL * factors])

    found = _least_squares(residuals, np.zeros(first.size), max_nfev=40)
    return kind(*(first * np.exp(found)).tolist())


def _least_squares(residuals: Callable, start, **options) -> np.ndarray:
    from scipy.optimize import least_squares

    # soft_l1: a batch that the formula does not describe must not bend it for all others
    return least_squares(residuals, start, loss="soft_l1", f_scale=0.05, **options).x


def cross_validate(
    fit: Callable[[list[int]], Model], predict: Callable[[Model, int], Prediction], count: int
) -> list[Prediction]:
    """Predict each of `count` batches by a fit to the others of _FOLDS parts."""
    # Shuffled: neighbours of a drawn sequence belong to different families.
    fold = np.random.default_rng(0).permutation(count) % _FOLDS
    models = [fit(np.flatnonzero(fold != part).tolist()) for part in range(_FOLDS)]
    return [predict(models[part], i) for i, part in enumerate(fold)]


def log_rms(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Return the root mean square of log(predicted / measured): 0.05 is about five per cent."""
    return float(np.sqrt(np.mean(np.log(predicted / measured) ** 2)))
