"""Fits RowTileRates to samples; judges a fit by the cuts that it would choose."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import geometric_mean

import numpy as np

from eval.row_tile_fit.samples import Sample
from sgl_prefix_attn.calibrate.fit import log_rms
from sgl_prefix_attn.plan.row_tile_time import RowTileRates


def fit(samples: list[Sample], start: RowTileRates | None = None) -> RowTileRates:
    """Rates with which the samples take their times, as nearly as can be, in logarithms.

    A rate stays within a factor of eight of where it starts: what the samples do not tell apart
    must not run away.
    """
    from scipy.optimize import least_squares

    names = list(vars(start or RowTileRates()))
    first = np.array(list(vars(start or RowTileRates()).values()))
    target = np.log([sample.us for sample in samples])

    def residuals(factors) -> np.ndarray:
        rates = RowTileRates(*(first * np.exp(factors)))
        return np.log([sample.predicted_us(rates) for sample in samples]) - target

    bound = np.log(8.0)
    found = least_squares(
        residuals, np.zeros(len(names)), bounds=(-bound, bound), loss="soft_l1", f_scale=0.05,
        max_nfev=40,
    )  # fmt: skip
    return RowTileRates(*(first * np.exp(found.x)).tolist())


@dataclass(frozen=True)
class Judgement:
    """Of rates on one head configuration: root mean square of log(predicted / measured), and the
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


def leave_one_out(samples: list[Sample], rates: RowTileRates) -> list[Judgement]:
    """Judge each head configuration by a fit to the others, which begins at `rates`.

    Raises ValueError for samples of a single one.
    """
    names = list(dict.fromkeys(sample.heads for sample in samples))
    if len(names) < 2:
        raise ValueError(f"samples of {names[0]} alone: there is nothing to leave out")
    found = []
    for name in names:
        others = fit([sample for sample in samples if sample.heads != name], rates)
        found.append(judge(name, [s for s in samples if s.heads == name], others))
    return found
