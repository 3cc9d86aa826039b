"""Predicted times of one decode step, from what the host knows about it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.predict.record import Calibration
from sgl_prefix_attn.predict.stock_work import stock_work
from sgl_prefix_attn.predict.time_model import (
    ANY_PLAN,
    least_prefix,
    predict_prefix,
    predict_stock,
)
from sgl_prefix_attn.records import PathTable, PlanWork, Prediction


class Predictor:
    """Microseconds a layer of either kernel under one calibration; a pure function of it."""

    def __init__(self, calibration: Calibration):
        self._calibration = calibration
        self._costs = calibration.costs
        self.source = calibration.source
        # Compile the loops now (some seconds): not in the first decode step of a server.
        self.stock(np.ones(1, np.int64), 1)
        self.prefix(ANY_PLAN)

    def stock(self, seq_lens: np.ndarray, unique: int) -> float:
        """Of FlashInfer with lengths seq_lens int [B], padding rows of a graph included as 1;
        `unique` counts each shared token once."""
        calibration = self._calibration
        work = stock_work(seq_lens, unique, calibration.num_sms, calibration.key.heads.num_kv_heads)
        return predict_stock(calibration.stock, work, self._costs)

    def prefix(self, work: PlanWork) -> float:
        """Of a plan."""
        return predict_prefix(self._calibration.prefix, work, self._costs)

    def least_prefix(self, unique: int) -> float:
        """No plan of a batch with so many unique tokens is predicted to be faster."""
        return least_prefix(self._calibration.prefix, unique, self._costs)


@dataclass(frozen=True)
class Outlook:
    """What is known of a batch before it is planned: `predicted` has the least that any plan may
    take; unique_tokens counts each shared KV token once; shares: whether there are any."""

    predicted: Prediction
    unique_tokens: int
    shares: bool


def outlook(predictor: Predictor, paths: PathTable, num_rows: int) -> Outlook:
    """Of a batch in a graph of num_rows rows; what the batch does not fill is padding."""
    forest = build_forest(paths)
    unique = forest.unique_tokens
    rows = np.ones(max(paths.seq_lens.size, num_rows), np.int64)
    rows[: paths.seq_lens.size] = paths.seq_lens
    return Outlook(
        predicted=Prediction(predictor.stock(rows, unique), predictor.least_prefix(unique)),
        unique_tokens=unique,
        shares=forest.parent.size > 0,
    )
