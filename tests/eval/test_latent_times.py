"""Times over latent KV, of the kernel's rates and FlashAttention 3's coefficients, against those in
eval/results."""

import numpy as np
import pytest

from eval.bench_kernel.trees import Tree
from eval.pages.results import rows
from sgl_prefix_attn.plan.cut_time import LatentRates
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


def fa3(tree, heads):
    lens = np.full(tree.batch_size, tree.seq_len, np.int64)
    work = stock_work(lens, tree.unique_tokens, NUM_SMS, heads, "fa3")
    coefficients = stock_start("fa3", latent=True).values()
    return stock_physical(coefficients, work, KvCosts.of(BANDWIDTH, heads, 2))


@pytest.mark.parametrize(("provider", "predict"), [("prefix", planned), ("fa3", fa3)])
def test_predictions_are_near_what_was_measured(provider, predict):
    found = [row for row in rows("latent_h100") if row["provider"] == provider]
    assert len(found) == 24
    heads = [HeadConfig(int(row["heads"].partition("/")[0]), 1, 576, 512) for row in found]
    us = [predict(Tree.parse(row["tree"]), h) for row, h in zip(found, heads, strict=True)]
    assert log_rms(np.array(us), np.array([row["us"] for row in found])) < 0.05
