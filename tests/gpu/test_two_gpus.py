"""Two tensor-parallel ranks on two GPUs: prefix graphs beside NCCL's kernels, and ranks that decide
alike. tests/sglang/test_tensor_parallel.py has more of the latter, on a CPU.
"""

import pytest
import torch

from tests.gpu import test_engines as one_gpu
from tests.gpu.test_engines import MARGIN, NOISE, REFERENCE, TESTED
from tests.sglang.engine import Config
from tests.sglang.test_tensor_parallel import (
    ONE_FAILS,
    SCENARIO,
    ranks_steps,
    same_prefix_steps,
    sequence,
)

pytestmark = [
    *one_gpu.pytestmark,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

TWO_RANKS = {
    "tp_size": 2,
    # It may use NVLink multicast, which not every host has or allows.
    "enforce_disable_flashinfer_allreduce_fusion": True,
}
ENGINE = one_gpu.ENGINE | TWO_RANKS


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by backend."""
    env = one_gpu.config_of(TESTED, 1).env | {"PREFIX_ATTN_HEADROOM": "5"}
    jobs = {}
    for backend in (REFERENCE, NOISE, TESTED):
        faults = ("", ONE_FAILS) if backend == TESTED else ("",)
        scenarios = tuple((SCENARIO, fault) for fault in faults)
        engine = ENGINE | (one_gpu.SAME_PREFILL if backend == TESTED else {})
        jobs[backend] = (Config(f"two-gpus-{backend}", scenarios, engine, env), backend)
    return one_gpu.first_alone(jobs, tmp_path_factory.mktemp("engines"))


def share(runs, backend, fault=""):
    stock = runs[REFERENCE].outputs[SCENARIO, ""]
    return one_gpu.equal_share(stock, runs[backend].outputs[SCENARIO, fault])


def test_both_ranks_run_the_same_prefix_steps_from_graphs(runs):
    same_prefix_steps(runs[TESTED])
    assert one_gpu.all_from_graphs(runs[TESTED].log)
    assert share(runs, TESTED) >= share(runs, NOISE) - MARGIN


def test_a_planner_error_on_one_rank_makes_the_step_stock_on_both(runs):
    first, second = ranks_steps(runs[TESTED], ONE_FAILS)
    assert sequence(first, "variant", "requests") == sequence(second, "variant", "requests")
    failed = [reason == ("planner_error",) for reason in sequence(second, "reason")]
    assert any(failed) and not all(failed)
    assert failed == [reason == ("other_rank",) for reason in sequence(first, "reason")]
    assert share(runs, TESTED, ONE_FAILS) >= share(runs, NOISE) - MARGIN
