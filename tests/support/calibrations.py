"""Calibrations and samples that nobody measured."""

from dataclasses import replace
from datetime import date
from types import SimpleNamespace

import numpy as np

from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.record import RATES, Calibration, CalibrationKey, Origin
from sgl_prefix_attn.predict.stock_time import (
    STOCK_COEFFICIENTS,
    KvCosts,
    stock_physical,
    stock_work,
)
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.calibrate import cuts, procedure

HEADS = HeadConfig(8, 2, 64)
KEY = CalibrationKey("NVIDIA H100 80GB HBM3", "hopper", HEADS, "bfloat16", 1)
NUM_SMS = 132
VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}
TASK = procedure.Task(KEY, NUM_SMS, VERSIONS, seed=0, count=60, pool_tokens=1 << 17)
ORIGIN = Origin(seed=3, batches=100, pool_tokens=1 << 17, date=date(2026, 11, 20))
# Not the model's starting point, nor the rates by which cuts are chosen.
STOCK = (5.0, 0.3, 0.025, 1.3, 0.2, 0.8, 2.5)
BANDWIDTH = 2.9e6


def true_rates(start):
    return replace(
        start, wide=1.5 * start.wide, item=2 * start.item, hbm=start.hbm / 1.3, fixed=8.0
    )


def stock_start() -> dict[str, float]:
    return {name: start for name, start, *_ in STOCK_COEFFICIENTS}


def calibration(key=KEY, versions=VERSIONS, num_sms=NUM_SMS, source="measured") -> Calibration:
    return Calibration(
        key=key,
        versions=dict(versions),
        num_sms=num_sms,
        bandwidth=1.7e6,
        stock=stock_start() | {"split": 0.1 / 3},
        rates=vars(RATES[key.family]()) | {"item": 0.2 / 3},
        samples=100,
        errors={"stock": 0.1 / 3, "prefix": 0.05},
        origin=ORIGIN,
        source=source,
    )


class FakeMeter:
    """Times as a GPU would have that the models describe exactly, but for noise.

    measured counts the batches; from `broken_at` on measuring fails.
    """

    measured = 0
    broken_at = None

    def __init__(self, key=KEY, noise=0.0):
        shipped = store.find(key, NUM_SMS, folders=store.Folders(None, store.SHIPPED))
        self.key, self.start = key, shipped.calibration.kernel_rates
        self.planner = Planner(key.heads, num_sms=NUM_SMS, rates=self.start, headroom=0)
        self.backend = SimpleNamespace(num_sms=NUM_SMS, tile_rows=128, splits_nodes=False)
        self.noise = noise
        self.random = np.random.default_rng(5)

    def bandwidth(self, planner) -> float:
        return BANDWIDTH

    def measure(self, batch, plans):
        if type(self).measured == self.broken_at:
            raise RuntimeError("prefix and stock attention differ")
        type(self).measured += 1
        heads, forest = self.key.heads, build_forest(batch.paths)
        work = stock_work(batch.paths.seq_lens, batch.unique_tokens, NUM_SMS, heads)
        stock_us = stock_physical(STOCK, work, KvCosts.of(BANDWIDTH, heads, self.key.kv_bytes))
        tried = cuts.chosen(self.planner, forest)
        assert [plan.predicted_us for plan in plans] == [cut.us for cut in tried]
        us = cuts.predict(tried, forest.unique_tokens, self.planner, true_rates(self.start))
        factor = np.exp(self.noise * self.random.normal(size=1 + len(tried)))
        return [float(stock_us * factor[0])], (us * factor[1:]).tolist()
