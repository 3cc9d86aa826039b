"""Predicted microseconds a layer of both kernels: a few physical terms, then what they miss.

FlashInfer's terms are like those of a plan (plan/estimate.py). What remains, a few per cent, is
smooth in the logarithms of the work and is learnt by kernel ridge regression on centres.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.estimate import prefix_physical
from sgl_prefix_attn.predict.stock_work import StockWork
from sgl_prefix_attn.records import PlanWork

# Name, start, lowest, highest of every coefficient, in the order of the formula below.
STOCK_COEFFICIENTS = (
    ("launch", 7.0, 0.0, 50.0),  # us
    ("split", 0.1, -5.0, 20.0),  # us, when requests are split and merged
    ("piece", 0.1, 0.0, 2.0),  # us a piece
    ("bandwidth", 1.0, 0.3, 4.0),  # of unique KV, times the cost model's
    ("reread", 0.1, 0.0, 4.0),  # the same of KV read again, mostly from the L2 cache
    ("chain", 1.0, 0.05, 20.0),  # token of the longest chain, times the cost model's
    ("norm", 2.0, 1.0, 20.0),
)
# Some plan: for what asks how a prediction is made, and not for its time.
ANY_PLAN = PlanWork(1, 1, 1, 1, 1, 1, 1.0, 1.0, 1, 1)
# Logarithm; a correction beyond it is an extrapolation, not knowledge.
_LARGEST_CORRECTION = 0.15
LENGTH_SCALE = 1.5  # of the correction, in standard deviations of a feature


@dataclass(frozen=True)
class Correction:
    """Logarithm of measured / physical as a sum of Gaussians around centres.

    offset, scale  [F]    features are (x - offset) / scale
    centres        [C, F] in scaled features
    weights        [C]
    """

    offset: np.ndarray
    scale: np.ndarray
    centres: np.ndarray
    weights: np.ndarray

    def __call__(self, features: np.ndarray) -> float:
        return _sum_of_gaussians(
            features, self.offset, self.scale, self.centres, self.weights, 2 * LENGTH_SCALE**2
        )


@cached_njit
def _sum_of_gaussians(features, offset, scale, centres, weights, width):
    """Compiled: a decode step may wait for it."""
    x = (features - offset) / scale
    total = 0.0
    for i in range(weights.size):
        distance = 0.0
        for j in range(x.size):
            distance += (centres[i, j] - x[j]) ** 2
        total += weights[i] * math.exp(-distance / width)
    return total


@dataclass(frozen=True)
class TimeModel:
    """coefficients as STOCK_COEFFICIENTS or PREFIX_COEFFICIENTS name them; correction None: the
    physical part alone."""

    coefficients: tuple[float, ...]
    correction: Correction | None = None


def predict_stock(model: TimeModel, work: StockWork, costs: CostModel) -> float:
    """Microseconds a layer of FlashInfer's decode."""
    us = stock_physical(model.coefficients, work, costs)
    return _corrected(model, us, stock_features(work, us))


def predict_prefix(model: TimeModel, work: PlanWork, costs: CostModel) -> float:
    """Microseconds a layer of a plan."""
    us = prefix_physical(model.coefficients, work, costs)
    return _corrected(model, us, prefix_features(work, us))


def _corrected(model: TimeModel, us: float, features: np.ndarray) -> float:
    if model.correction is None:
        return us
    missed = model.correction(features)
    return us * math.exp(min(max(missed, -_LARGEST_CORRECTION), _LARGEST_CORRECTION))


def stock_physical(c, work: StockWork, costs: CostModel) -> float:
    launch, split, piece, bandwidth, reread, chain, norm = c
    memory = costs.kv_token * (bandwidth * work.unique + reread * (work.tokens - work.unique))
    busiest = chain * work.chain * costs.chain
    return (
        launch
        + split * (work.pieces > work.batch_size)
        + piece * work.pieces
        + (memory**norm + busiest**norm) ** (1 / norm)
    )


def stock_features(work: StockWork, us: float) -> np.ndarray:
    """What the correction looks at: logarithms of sizes, and how evenly the work is spread."""
    return np.log(
        (
            work.unique,
            work.tokens,
            work.chain,
            work.pieces,
            work.longest,
            us,
            work.chain * work.batch_size / work.tokens,
            # where all are as long, CTAs read shared KV in step and overlap it with nothing else
            work.longest * work.batch_size / work.tokens,
        )
    )


def prefix_features(work: PlanWork, us: float) -> np.ndarray:
    return np.log(
        (
            work.tail_tokens + 10,
            work.shared_tokens + 10,
            (work.shared_rows + 1000) ** 0.5,
            work.tail_chain + 10,
            work.shared_chain + 10,
            work.tail_items + 1,
            work.shared_items + 1,
            work.partials + 10,
            work.most_parts + 1,
            us,
        )
    )
