"""What predictions start from, without a calibration, against times in eval/results: the fallbacks'
coefficients over latent and e4m3 KV, and the rates of the kernel over latent KV."""

import numpy as np
import pytest

from eval.bench_kernel.trees import Tree
from eval.pages.results import rows
from sgl_prefix_attn.plan.kernel_rates import LatentRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.predict.bandwidths import usual_bandwidth
from sgl_prefix_attn.predict.stock_time import KvCosts, stock_physical, stock_start, stock_work
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.calibrate.fit import log_rms

NUM_SMS = 132
BANDWIDTH = usual_bandwidth("NVIDIA H100 80GB HBM3")


def planned(tree, heads):
    planner = Planner(heads, num_sms=NUM_SMS, rates=LatentRates(), tile_rows=64)
    return planner.plan(tree.paths()).predicted_us


def stock(fallback, kv_bytes):
    def predict(tree, heads):
        lens = np.full(tree.batch_size, tree.seq_len, np.int64)
        work = stock_work(lens, tree.unique_tokens, NUM_SMS, heads, fallback, kv_bytes)
        start = stock_start(heads, fallback, kv_bytes)
        return stock_physical(start.values(), work, KvCosts.of(BANDWIDTH, heads, kv_bytes))

    return predict


def heads_of(row):
    heads = tuple(map(int, row["heads"].split("/")))
    latent = (576, 512) if row["head_dim"] == 576 else (row["head_dim"],)
    return HeadConfig(*heads, *latent)


@pytest.mark.parametrize(
    ("name", "provider", "predict"),
    [
        ("latent_h100", "prefix", planned),
        ("latent_h100", "fa3", stock("fa3", 2)),
        ("kernel_h100_e4m3", "fa3", stock("fa3", 1)),
        ("kernel_h100_e4m3", "flashinfer", stock("flashinfer", 1)),
    ],
)
def test_predictions_are_near_what_was_measured(name, provider, predict):
    found = [x for x in rows(name) if x["provider"] == provider]
    if name == "kernel_h100_e4m3":
        found = [x for x in found if x["dtype"] == "fp8_e4m3"]
    assert len(found) >= 24
    us = [predict(Tree.parse(row["tree"]), heads_of(row)) for row in found]
    assert log_rms(np.array(us), np.array([row["us"] for row in found])) < 0.06
