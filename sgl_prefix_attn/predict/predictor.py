"""Predicted times of one decode step, from what the host knows about it: one predictor for each
family of kernels, because it knows the plans of its family."""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.plan.estimate import prefix_physical
from sgl_prefix_attn.plan.row_tile_words import RowTilePlan
from sgl_prefix_attn.predict.record import Calibration
from sgl_prefix_attn.predict.row_tile_rates import row_tile_source
from sgl_prefix_attn.predict.stock_time import stock_physical, stock_work
from sgl_prefix_attn.records import Plan


class _StockPredictor:
    """Predicts stock kernels, which are the same beside any family; microseconds per layer."""

    def __init__(self, calibration: Calibration, source: str):
        self.source = source
        self._costs = calibration.costs
        self._num_sms = calibration.num_sms
        self._stock = tuple(calibration.stock.values())
        # Compile the loops now (some seconds): not in the first decode step of a server.
        self.stock(np.ones(1, np.int64), 1)

    def stock(self, seq_lens: np.ndarray, unique: int) -> float:
        """Predict FlashInfer's time for lengths seq_lens int [B], padding rows of a graph included
        as 1; `unique` counts each shared token once."""
        work = stock_work(seq_lens, unique, self._num_sms, self._costs.num_kv_heads)
        return stock_physical(self._stock, work, self._costs)


class Predictor(_StockPredictor):
    """Predicts either kernel beside plans of packs; a pure function of one calibration."""

    def __init__(self, calibration: Calibration):
        super().__init__(calibration, calibration.source)
        self._prefix = tuple(calibration.prefix.values())

    def prefix(self, plan: Plan) -> float:
        """Predict the time of a plan."""
        return prefix_physical(self._prefix, plan.work, self._costs)


class RowTilePredictor(_StockPredictor):
    """Predicts stock kernels beside row tiles, which their planner predicts itself."""

    def __init__(self, calibration: Calibration):
        super().__init__(calibration, row_tile_source(calibration))

    def prefix(self, plan: RowTilePlan) -> float:
        """Return what the planner predicted of its plan."""
        return plan.predicted_us
