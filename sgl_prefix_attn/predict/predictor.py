"""Predicted times of one decode step, from what the host knows about it."""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.predict.record import Calibration
from sgl_prefix_attn.predict.stock_work import stock_work
from sgl_prefix_attn.predict.time_model import (
    ANY_PLAN,
    predict_prefix,
    predict_stock,
)
from sgl_prefix_attn.records import PlanWork


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
