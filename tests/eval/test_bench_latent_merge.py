"""eval.bench_latent_merge without a GPU: the plans that it compares, and what it refuses."""

import numpy as np
import pytest

from eval.bench_kernel.oracle import Wrong
from eval.bench_kernel.trees import Tree
from eval.bench_latent_merge import _must_be_wrong, main, parts_alone
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import LatentRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig


def test_plans_differ_in_their_parts_alone():
    planner = Planner(HeadConfig(16, 1, 576, 512), num_sms=132, rates=LatentRates(), tile_rows=64)
    plan = planner.plan_forest(build_forest(Tree.parse("1,64_2048,256").paths()))
    alone = parts_alone(plan)
    assert (plan.items[:, W.I_PARTS] > 1).any() and (alone.items[:, W.I_PARTS] <= 1).all()
    alone.items[:, W.I_PARTS] = plan.items[:, W.I_PARTS]
    assert np.array_equal(alone.words, plan.words)


class Judge:
    def __init__(self, finds):
        self.finds = finds

    def judge(self, outs, when):
        if self.finds:
            raise Wrong(when, 1.0, 0.0)


def test_parts_that_nobody_merged_must_be_wrong():
    _must_be_wrong(Judge(True), [])
    with pytest.raises(RuntimeError, match="not merged are right"):
        _must_be_wrong(Judge(False), [])


def test_a_cpu_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "argument --device: no kernel over latent KV on cpu" in capsys.readouterr().err
