"""Predicted times of one decode step, from what the host knows about it."""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.plan.estimate import prefix_physical
from sgl_prefix_attn.predict.record import Calibration
from sgl_prefix_attn.predict.stock_time import stock_physical, stock_work
from sgl_prefix_attn.records import PlanWork


class Predictor:
    """Predicts microseconds per layer of either kernel; a pure function of one calibration."""

    def __init__(self, calibration: Calibration):
        self.source = calibration.source
        self._costs = calibration.costs
        self._num_sms = calibration.num_sms
        self._stock = tuple(calibration.stock.values())
        self._prefix = tuple(calibration.prefix.values())
        # Compile the loops now (some seconds): not in the first decode step of a server.
        self.stock(np.ones(1, np.int64), 1)

    def stock(self, seq_lens: np.ndarray, unique: int) -> float:
        """Predict FlashInfer's time for lengths seq_lens int [B], padding rows of a graph included
        as 1; `unique` counts each shared token once."""
        work = stock_work(seq_lens, unique, self._num_sms, self._costs.num_kv_heads)
        return stock_physical(self._stock, work, self._costs)

    def prefix(self, work: PlanWork) -> float:
        """Predict the time of a plan."""
        return prefix_physical(self._prefix, work, self._costs)
