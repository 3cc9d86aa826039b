"""Engines whose extend batches run plans on a Hopper GPU, beside prefill CUDA graphs."""

import pytest
import torch

from tests.gpu import test_engines
from tests.gpu.test_engines import (
    ENGINE,
    MARGIN,
    NOISE,
    REFERENCE,
    TESTED,
    all_from_graphs,
    first_alone,
    share,
)
from tests.sglang.engine import Config, plain

pytestmark = [
    *test_engines.pytestmark,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="tried on Hopper alone",
    ),
]

SCENARIOS = plain("staggered", "siblings", "two_turns", "unshared", "late_prompt", "crowd")
MIXED = {"chunked_prefill_size": 64, "enable_mixed_chunk": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two stock engines, and one whose extend batches all run plans, shared prefixes or not."""

    def config(name, scenarios=SCENARIOS, **engine):
        env = {
            "PREFIX_ATTN_CPU_PLATFORM": "0",
            "PREFIX_ATTN_POLICY": "prefix",
            "PREFIX_ATTN_PREFILL": "1",
        }
        return Config(f"extends-{name}", scenarios, ENGINE | MIXED | engine, env)

    faulty = (*SCENARIOS, ("siblings", "swap_chains"))
    jobs = {run: (config(run), run) for run in (REFERENCE, NOISE)}
    jobs[TESTED] = (config(TESTED, faulty, prefill_attention_backend=TESTED), TESTED)
    return first_alone(jobs, tmp_path_factory.mktemp("engines"))


def test_outputs_are_as_equal_as_those_of_two_stock_backends(runs):
    noise, tested = share(runs, NOISE, SCENARIOS), share(runs, TESTED, SCENARIOS)
    print(f"equal tokens: {REFERENCE}/{TESTED} {tested:.4f}, {REFERENCE}/{NOISE} {noise:.4f}")
    assert tested >= noise - MARGIN


def test_extend_batches_ran_plans_beside_prefill_graphs(runs):
    run = runs[TESTED]
    extends = [step for key in SCENARIOS for step in run.steps[key] if "extend" in step]
    assert {(step["variant"], step["reason"]) for step in extends} == {("prefix", "forced")}
    assert any(step["read"] < step["query_centric"] for step in extends)
    assert any(step["extend"].count(1) > 1 and max(step["extend"]) > 30 for step in extends)
    assert all_from_graphs(run.log, "Prefill") and all_from_graphs(runs[REFERENCE].log, "Prefill")


def test_swapped_chains_are_found(runs):
    noise = share(runs, NOISE, plain("siblings"))
    stock = runs[REFERENCE].outputs["siblings", ""]
    outputs = runs[TESTED].outputs["siblings", "swap_chains"]
    assert test_engines.equal_share(stock, outputs) < noise - MARGIN
