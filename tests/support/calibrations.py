"""Calibrations and samples that nobody measured."""

from datetime import date

import numpy as np

from sgl_prefix_attn.calibrate import procedure
from sgl_prefix_attn.plan import CostModel
from sgl_prefix_attn.plan.costs import GPU_RATES
from sgl_prefix_attn.plan.estimate import PREFIX_COEFFICIENTS, prefix_physical, starts
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey, Origin
from sgl_prefix_attn.predict.stock_time import STOCK_COEFFICIENTS, stock_physical, stock_work
from sgl_prefix_attn.records import HeadConfig

HEADS = HeadConfig(8, 2, 64)
KEY = CalibrationKey("NVIDIA H100 80GB HBM3", HEADS, "bfloat16", 1)
NUM_SMS = 132
VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}
TASK = procedure.Task(KEY, NUM_SMS, VERSIONS, seed=0, count=60, pool_tokens=1 << 17)
ORIGIN = Origin(seed=3, batches=100, pool_tokens=1 << 17, date=date(2026, 11, 20))
# Neither model's starting point.
STOCK = (5.0, 0.3, 0.025, 1.3, 0.2, 0.8, 2.5)
PREFIX = (6.0, 2.0, 0.02, 1.6, 0.05, 1.2, 0.3, 0.5, 1.4, 0.25, 1.8)


def calibration(key=KEY, versions=VERSIONS, num_sms=NUM_SMS, source="measured") -> Calibration:
    return Calibration(
        key=key,
        versions=dict(versions),
        num_sms=num_sms,
        rates=GPU_RATES["A100"],
        stock=starts(STOCK_COEFFICIENTS) | {"split": 0.1 / 3},
        prefix=starts(PREFIX_COEFFICIENTS) | {"merge": 0.2 / 3},
        samples=100,
        errors={"stock": 0.1 / 3, "prefix": 0.05},
        origin=ORIGIN,
        source=source,
    )


class FakeMeter:
    """Times as a GPU would have that the physical models describe exactly, but for noise.

    measured counts the batches; from `broken_at` on measuring fails.
    """

    measured = 0
    broken_at = None

    def __init__(self, planner, max_batch, noise=0.0):
        self.planner = planner
        self.costs = CostModel.from_rates(GPU_RATES["H100"], planner.heads)
        self.noise = noise
        self.random = np.random.default_rng(5)

    def prefix_us(self, plan, paths) -> float:
        work, costs = plan.work, self.costs
        return (
            costs.launch
            + costs.kv_token * (work.tail_tokens + work.shared_tokens)
            + costs.pack * work.shared_items
            + costs.partial * work.partials
            + costs.mma_row * max(0, work.shared_rows - 64 * work.shared_tokens)
        )

    def measure(self, batch):
        if type(self).measured == self.broken_at:
            raise RuntimeError("prefix and stock attention differ")
        type(self).measured += 1
        heads = self.planner.heads
        work = stock_work(batch.paths.seq_lens, batch.unique_tokens, NUM_SMS, heads)
        factor = np.exp(self.random.normal(0, self.noise, 2)) if self.noise else (1.0, 1.0)
        costs = self.planner.costs
        prefix = prefix_physical(PREFIX, self.planner.plan(batch.paths).work, costs)
        return float(stock_physical(STOCK, work, costs) * factor[0]), float(prefix * factor[1])
