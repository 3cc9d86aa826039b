"""Fits RowTileRates to samples; judges a fit by the cuts that it would choose."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import geometric_mean

import numpy as np

from eval.row_tile_fit.samples import Sample
from sgl_prefix_attn.calibrate.fit import log_rms
from sgl_prefix_attn.plan.row_tile_time import RowTileRates

_PULL = 0.5
_FOLDS = 5


def fit(samples: list[Sample], start: RowTileRates | None = None) -> RowTileRates:
    """Rates with which the samples take their times, as nearly as can be, in logarithms.

    A rate that is off by a factor of e costs as much as every sample off by _PULL / sqrt(samples):
    what the samples do not tell apart stays where it starts.
    """
    from scipy.optimize import least_squares

    first = np.array(list(vars(start or RowTileRates()).values()))
    target = np.log([sample.us for sample in samples])

    def residuals(factors) -> np.ndarray:
        rates = RowTileRates(*(first * np.exp(factors)))
        errors = np.log([sample.predicted_us(rates) for sample in samples]) - target
        return np.concatenate([errors, _PULL * factors])

    found = least_squares(
        residuals, np.zeros(len(first)), loss="soft_l1", f_scale=0.05, max_nfev=40
    )
    return RowTileRates(*(first * np.exp(found.x)).tolist())


@dataclass(frozen=True)
class Judgement:
    """Of rates on one part of the samples: root mean square of log(predicted / measured), and the
    time of the cuts that they choose over that of the best that were measured: geometric mean and
    worst over the batches with several cuts."""

    heads: str
    batches: int
    samples: int
    error: float
    regret: float
    worst: float


def judge(heads: str, samples: list[Sample], rates: RowTileRates) -> Judgement:
    predicted = np.array([sample.predicted_us(rates) for sample in samples])
    measured = np.array([sample.us for sample in samples])
    of_batch: dict[str, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        of_batch[sample.batch].append(i)
    several = [np.array(mine) for mine in of_batch.values() if len(mine) > 1]
    if not several:
        raise ValueError(f"{heads}: no batch has several cuts to choose from")
    ratios = [measured[i[predicted[i].argmin()]] / measured[i].min() for i in several]
    return Judgement(
        heads, len(several), len(samples), log_rms(predicted, measured),
        geometric_mean(ratios), float(max(ratios)),
    )  # fmt: skip


def parts(samples: list[Sample]) -> dict[str, list[Sample]]:
    """Divide samples into what is left out in turn: by heads; of a single head configuration,
    fifths of its batches."""
    heads = list(dict.fromkeys(sample.heads for sample in samples))
    if len(heads) > 1:
        return {name: [s for s in samples if s.heads == name] for name in heads}
    fold = {batch: i % _FOLDS for i, batch in enumerate(dict.fromkeys(s.batch for s in samples))}
    return {
        f"{heads[0]}, fifth {i + 1}": [s for s in samples if fold[s.batch] == i]
        for i in range(_FOLDS)
    }


def leave_one_out(samples: list[Sample], rates: RowTileRates) -> list[Judgement]:
    """Judge each part by a fit to the others, which begins at `rates`."""
    found = []
    for name, mine in parts(samples).items():
        left_out = set(map(id, mine))
        others = fit([sample for sample in samples if id(sample) not in left_out], rates)
        found.append(judge(name, mine, others))
    return found
