"""Fits the time models to measured batches: coefficients first, then the correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.estimate import PREFIX_COEFFICIENTS, prefix_physical
from sgl_prefix_attn.predict.stock_work import StockWork
from sgl_prefix_attn.predict.time_model import (
    LENGTH_SCALE,
    STOCK_COEFFICIENTS,
    Correction,
    TimeModel,
    prefix_features,
    stock_features,
    stock_physical,
)
from sgl_prefix_attn.records import PlanWork

# Standard deviations, in logarithms: of what the physical part misses, of one measurement.
_MISSED, _NOISE = 0.06, 0.012
_MAX_CENTRES = 400
_FOLDS = 5


def fit_stock(works: Sequence[StockWork], us: np.ndarray, costs: CostModel) -> TimeModel:
    return _fit(works, us, costs, STOCK_COEFFICIENTS, stock_physical, stock_features)


def fit_prefix(works: Sequence[PlanWork], us: np.ndarray, costs: CostModel) -> TimeModel:
    return _fit(works, us, costs, PREFIX_COEFFICIENTS, prefix_physical, prefix_features)


def cross_validate(
    fit: Callable, predict: Callable, works: Sequence, us: np.ndarray, costs: CostModel
) -> np.ndarray:
    """Microseconds [n] of every batch, predicted by a fit to the others of _FOLDS parts."""
    # Shuffled: neighbours of a drawn sequence belong to different families.
    fold = np.random.default_rng(0).permutation(len(us)) % _FOLDS
    predicted = np.empty(len(us))
    for part in range(_FOLDS):
        seen = np.flatnonzero(fold != part)
        model = fit([works[i] for i in seen], us[seen], costs)
        for i in np.flatnonzero(fold == part):
            predicted[i] = predict(model, works[i], costs)
    return predicted


def log_rms(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Root mean square of log(predicted / measured): 0.05 is about five per cent."""
    return float(np.sqrt(np.mean(np.log(predicted / measured) ** 2)))


def _fit(works, us, costs, coefficients, physical: Callable, features: Callable) -> TimeModel:
    from scipy.optimize import least_squares

    target = np.log(us)

    def residuals(c) -> np.ndarray:
        predicted = np.array([physical(c, work, costs) for work in works])
        # A coefficient may be negative on the way: such a time is as bad as a tiny one.
        return np.log(np.maximum(predicted, 1e-3)) - target

    _, start, low, high = zip(*coefficients, strict=True)
    # soft_l1: a batch that the formula does not describe must not bend it for all others
    fitted = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.05)
    c = tuple(float(value) for value in fitted.x)
    predicted = [physical(c, work, costs) for work in works]
    rows = np.array([features(work, p) for work, p in zip(works, predicted, strict=True)])
    return TimeModel(c, _fit_correction(rows, target - np.log(predicted)))


def _fit_correction(rows: np.ndarray, missed: np.ndarray) -> Correction:
    """Gaussian-process regression of `missed` [n] on rows [n, F], with the most spread-out rows as
    its centres (subset of regressors; Rasmussen and Williams, section 8.3)."""
    offset, scale = rows.mean(0), np.maximum(rows.std(0), 1e-6)
    x = (rows - offset) / scale
    centres = x[_spread_out(x, min(_MAX_CENTRES, len(x)))]
    kernel = _gaussians(x, centres)
    between = _gaussians(centres, centres) + 1e-6 * np.eye(len(centres))
    ridge = (_NOISE / _MISSED) ** 2
    weights = np.linalg.solve(kernel.T @ kernel + ridge * between, kernel.T @ missed)
    return Correction(offset, scale, centres, weights)


def _gaussians(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    distance = ((a[:, None] - b[None]) ** 2).sum(-1)
    return np.exp(-distance / (2 * LENGTH_SCALE**2))


def _spread_out(x: np.ndarray, count: int) -> list[int]:
    """Farthest-point sampling: each next row is the one farthest from all chosen ones."""
    chosen = [int(((x - x.mean(0)) ** 2).sum(1).argmin())]
    distance = ((x - x[chosen[0]]) ** 2).sum(1)
    while len(chosen) < count:
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, ((x - x[chosen[-1]]) ** 2).sum(1))
    return chosen
