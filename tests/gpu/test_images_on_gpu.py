"""A tiny Qwen3-VL in engines with CUDA graphs: steps below images run plans, as near to stock
attention as two stock backends are; every second step is checked by it, layer by layer."""

import pytest

from tests.gpu import test_engines as plain_engines
from tests.gpu.test_configurations import CHECKS, PREFIX
from tests.gpu.test_engines import ENGINE, MARGIN, NO_PREFILL_GRAPHS, NOISE, TESTED, equal_share
from tests.sglang.engine import Config, plain, run_together
from tests.support.qwen_vl import write_model

pytestmark = plain_engines.pytestmark

STOCK = "fa3"
FAULT = ("images", "shared_node_dropped")
HEADS = {
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 1e4},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    env = {
        "PREFIX_ATTN_CPU_PLATFORM": "0", "PREFIX_ATTN_POLICY": "prefix", **CHECKS,
    }  # fmt: skip
    stock = Config("images", plain("images"), ENGINE | NO_PREFILL_GRAPHS, env)
    behind = ENGINE | NO_PREFILL_GRAPHS | {"prefill_attention_backend": STOCK}
    tested = Config("images", (*plain("images"), FAULT), behind, env)
    jobs = {STOCK: (stock, STOCK), NOISE: (stock, NOISE), TESTED: (tested, TESTED)}
    return run_together(jobs, write_model(folder / "model", "qwen3_vl", **HEADS), folder / "runs")


def test_every_step_runs_a_plan_from_a_graph(runs):
    steps = runs[TESTED].steps["images", ""]
    assert {(step["variant"], step["reason"]) for step in steps} == {PREFIX}
    assert any(step["cross_check"] for step in steps) and steps[-1]["mismatches"] == 0
    assert "cuda graph: True" in runs[TESTED].log
    plans = [x for x in steps if len(x["requests"]) == 5 and x["nodes"] is not None]
    # as on a CPU; whether so short ones are read once is the planner's decision
    assert plans and all(step["nodes"] == 4 for step in plans)


def test_outputs_are_as_near_as_those_of_two_stock_backends(runs):
    outputs, stock, noise = (runs[name].outputs["images", ""] for name in (TESTED, STOCK, NOISE))
    assert stock[:2] != stock[2:4], "the images change what is written"
    share, allowed = equal_share(stock, outputs), equal_share(stock, noise)
    print(f"equal tokens {share:.4f}, two stock backends {allowed:.4f}")
    assert share >= allowed - MARGIN


def test_a_planted_fault_is_found(runs):
    mismatches = [step["mismatches"] for step in runs[TESTED].steps[FAULT]]
    assert mismatches[-1] > mismatches[0]
