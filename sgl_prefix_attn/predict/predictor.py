"""Predicted times of one decode step, from what the host knows about it."""

import numpy as np

from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.predict.record import Calibration
from sgl_prefix_attn.predict.stock_time import stock_physical, stock_work


class Predictor:
    """Predicts the fallback's decode, and plans, whose planner predicts them by the calibration's
    rates; a pure function of one calibration. Microseconds per layer."""

    def __init__(self, calibration: Calibration):
        self.source: str = calibration.source
        self._costs = calibration.kv_costs
        self._key = calibration.key
        self._num_sms = calibration.num_sms
        self._stock = tuple(calibration.stock.values())
        # Compile the loops now (some seconds): not in the first decode step of a server.
        self.stock(np.ones(1, np.int64), 1)

    def stock(
        self, seq_lens: np.ndarray, unique: int, query_lens: np.ndarray | None = None
    ) -> float:
        """Predict the fallback's time for lengths seq_lens int [B], padding rows of a graph
        included as 1; `unique` counts each shared token once."""
        key = self._key
        work = stock_work(seq_lens, unique, self._num_sms, key.heads, key.fallback, key.kv_bytes)
        return stock_physical(self._stock, work, self._costs)

    def prefix(self, plan: Plan) -> float:
        """Return the time of a plan that was made with the calibration's rates."""
        return plan.predicted_us
