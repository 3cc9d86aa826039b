"""Fits the coefficients of both kernels' times to measured batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.estimate import PREFIX_COEFFICIENTS, prefix_physical
from sgl_prefix_attn.predict.stock_time import STOCK_COEFFICIENTS, stock_physical

_FOLDS = 5


@dataclass(frozen=True)
class TimeModel:
    """A formula (coefficients, work, costs) -> microseconds per layer.

    table  name, start, lowest, highest of every coefficient
    """

    formula: Callable
    table: tuple

    def fit(self, works: Sequence, us: np.ndarray, costs: CostModel) -> dict[str, float]:
        """Return the named coefficients with which `works` take `us` [n], as nearly as can be."""
        from scipy.optimize import least_squares

        names, start, low, high = zip(*self.table, strict=True)
        target = np.log(us)

        def residuals(c) -> np.ndarray:
            predicted = np.array([self.formula(c, work, costs) for work in works])
            # A coefficient may be negative on the way: such a time is as bad as a tiny one.
            return np.log(np.maximum(predicted, 1e-3)) - target

        # soft_l1: a batch that the formula does not describe must not bend it for all others
        found = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.05)
        return dict(zip(names, found.x.tolist(), strict=True))

    def predict(self, coefficients: dict[str, float], works: Sequence, costs: CostModel):
        """Return microseconds per layer, float64 [n], of n works."""
        return np.array([self.formula(coefficients.values(), work, costs) for work in works])


STOCK_MODEL = TimeModel(stock_physical, STOCK_COEFFICIENTS)
PREFIX_MODEL = TimeModel(prefix_physical, PREFIX_COEFFICIENTS)


def cross_validate(model: TimeModel, works: Sequence, us: np.ndarray, costs: CostModel):
    """Predict every batch by a fit to the others of _FOLDS parts: microseconds, float64 [n]."""
    # Shuffled: neighbours of a drawn sequence belong to different families.
    fold = np.random.default_rng(0).permutation(len(us)) % _FOLDS
    predicted = np.empty(len(us))
    for part in range(_FOLDS):
        seen, unseen = np.flatnonzero(fold != part), np.flatnonzero(fold == part)
        coefficients = model.fit([works[i] for i in seen], us[seen], costs)
        predicted[unseen] = model.predict(coefficients, [works[i] for i in unseen], costs)
    return predicted


def log_rms(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Return the root mean square of log(predicted / measured): 0.05 is about five per cent."""
    return float(np.sqrt(np.mean(np.log(predicted / measured) ** 2)))
