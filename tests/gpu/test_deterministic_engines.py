"""Deterministic inference on engines with CUDA graphs: a request's log-probabilities are the same
bits beside others."""

import pytest
import torch

from eval.tiny_model import write_tiny_llama
from tests.gpu import test_engines as plain_engines
from tests.gpu.test_engines import ENGINE, NO_PREFILL_GRAPHS, TESTED, all_from_graphs
from tests.gpu.test_two_gpus import TWO_RANKS
from tests.sglang.engine import Config, plain, run_together
from tests.sglang.test_deterministic import PLANNED, SCORED, same_in_prompts

pytestmark = plain_engines.pytestmark

PREFILL = {"prefill_attention_backend": "fa3"}
DETERMINISTIC = {"enable_deterministic_inference": True, **PREFILL}
BOTH = plain("by_itself", "beside_siblings")
SCENARIOS = BOTH + plain("rollouts")  # with seeds, which the usual mode does not take
PLANNED_PROMPTS = {"enable_deterministic_inference": True, **PLANNED}
RUNS = {
    "prefix": DETERMINISTIC,
    "prefix_page_16": DETERMINISTIC | {"page_size": 16},
    "portable": DETERMINISTIC,
    "prompts": PLANNED_PROMPTS | {"chunked_prefill_size": 128},
    "usual": PREFILL,
}
if torch.cuda.device_count() > 1:
    RUNS["two_ranks"] = DETERMINISTIC | TWO_RANKS
ENV = {
    "portable": {"PREFIX_ATTN_KERNELS": "portable"}, "prompts": {"PREFIX_ATTN_PREFILL": "1"},
}  # fmt: skip
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
        own = ENV.get(name, {})
        scenarios = BOTH if name == "usual" else SCENARIOS
        if name == "prompts":
            scenarios += plain(*SCORED)
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
    every = [step for key in SCENARIOS for step in run.steps[key]]
    steps = [step for step in every if "extend" not in step]
    assert {step["variant"] for step in every} == {"prefix"}
    assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "forced")}
    assert any(step["read"] and step["read"] < step["query_centric"] for step in steps)
    assert all_from_graphs(run.log)


def test_a_token_has_the_same_bits_in_a_prompt_and_generated(runs):
    same_in_prompts(runs["prompts"].outputs)


def test_the_usual_mode_has_other_bits(runs):
    """So the comparison above can fail."""
    outputs = runs["usual"].outputs
    assert outputs["by_itself", ""] != outputs["beside_siblings", ""]
