"""Deterministic inference on engines with CUDA graphs: a request's log-probabilities are the same
bits beside others."""

import pytest
import torch

from eval.tiny_model import write_tiny_llama
from tests.gpu import test_engines as plain_engines
from tests.gpu.test_engines import ENGINE, NO_PREFILL_GRAPHS, TESTED, all_from_graphs
from tests.gpu.test_two_gpus import TWO_RANKS
from tests.sglang.engine import Config, plain, run_together

pytestmark = plain_engines.pytestmark

PREFILL = {"prefill_attention_backend": "fa3"}
DETERMINISTIC = {"enable_deterministic_inference": True, **PREFILL}
BOTH = plain("by_itself", "beside_siblings")
SCENARIOS = BOTH + plain("rollouts")  # with seeds, which the usual mode does not take
RUNS = {
    "prefix": DETERMINISTIC,
    "prefix_page_16": DETERMINISTIC | {"page_size": 16},
    "portable": DETERMINISTIC,
    "usual": PREFILL,
}
if torch.cuda.device_count() > 1:
    RUNS["two_ranks"] = DETERMINISTIC | TWO_RANKS
BITS = [name for name in RUNS if name != "usual"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    model = write_tiny_llama(
        folder / "model", hidden_size=512, intermediate_size=1024, head_dim=128
    )
    env = {"PREFIX_ATTN_CPU_PLATFORM": "0", "PREFIX_ATTN_POLICY": "prefix"}
    jobs = {}
    for name, arguments in RUNS.items():
        own = {"PREFIX_ATTN_KERNELS": "portable"} if name == "portable" else {}
        scenarios = BOTH if name == "usual" else SCENARIOS
        jobs[name] = (
            Config(name, scenarios, ENGINE | NO_PREFILL_GRAPHS | arguments, env | own),
            TESTED,
        )
    return run_together(jobs, model, folder)


@pytest.mark.parametrize("name", BITS)
def test_bits_do_not_depend_on_other_requests(runs, name):
    outputs = runs[name].outputs
    alone = outputs["by_itself", ""]
    assert len(alone) == 70 and alone == outputs["beside_siblings", ""]
    assert outputs["rollouts", ""]["differences"] == []
    assert len(set(map(tuple, outputs["rollouts", ""]["texts"]))) > 10, "the seeds draw alike"


@pytest.mark.parametrize("name", BITS)
def test_every_step_runs_a_plan_from_a_graph(runs, name):
    run = runs[name]
    steps = [step for key in SCENARIOS for step in run.steps[key]]
    assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "forced")}
    assert any(step["read"] and step["read"] < step["query_centric"] for step in steps)
    assert all_from_graphs(run.log)


def test_the_usual_mode_has_other_bits(runs):
    """So the comparison above can fail."""
    outputs = runs["usual"].outputs
    assert outputs["by_itself", ""] != outputs["beside_siblings", ""]
