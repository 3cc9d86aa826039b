"""Predicted times of one decode step, from what the host knows about it: one predictor for each
family of kernels, because it knows the plans of its family."""

from typing import Any

import numpy as np

from sgl_prefix_attn.plan.estimate import prefix_physical
from sgl_prefix_attn.predict.record import Calibration
from sgl_prefix_attn.predict.row_tile_rates import row_tile_source
from sgl_prefix_attn.predict.stock_time import stock_physical, stock_work


class Predictor:
    """Predicts stock kernels, which are the same beside any family, and plans of packs; a pure
    function of one calibration. Microseconds per layer."""

    def __init__(self, calibration: Calibration):
        self.source: str = calibration.source
        self._costs = calibration.costs
        self._heads = calibration.key.heads
        self._num_sms = calibration.num_sms
        self._stock = tuple(calibration.stock.values())
        self._prefix = tuple(calibration.prefix.values())
        # Compile the loops now (some seconds): not in the first decode step of a server.
        self.stock(np.ones(1, np.int64), 1)

    def stock(self, seq_lens: np.ndarray, unique: int) -> float:
        """Predict FlashInfer's time for lengths seq_lens int [B], padding rows of a graph included
        as 1; `unique` counts each shared token once."""
        work = stock_work(seq_lens, unique, self._num_sms, self._heads)
        return stock_physical(self._stock, work, self._costs)

    def prefix(self, plan: Any) -> float:
        """Predict the time of a plan."""
        return prefix_physical(self._prefix, plan.work, self._costs)


class RowTilePredictor(Predictor):
    """Predicts stock kernels beside row tiles, whose planner predicts its plans itself."""

    def __init__(self, calibration: Calibration):
        super().__init__(calibration)
        self.source = row_tile_source(calibration)

    def prefix(self, plan: Any) -> float:
        return plan.predicted_us
