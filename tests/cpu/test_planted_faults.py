"""The comparison with full attention must fail where a plan or an executor is wrong."""

import pytest
import torch

from eval.compare_outputs import faults
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support import plan_faults
from tests.support.forests import path_table, planner
from tests.support.problems import assert_attention, make_problem
from tests.support.running import loaded, run

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = HeadConfig(8, 2, 64)
TREE = path_table([(-1, 130), (0, 40)], [1, 1, 0, 1, -1], [33, 33, 60, 35, 36])


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("fault", faults.FAULTS)
def test_each_fault_of_the_evaluation_changes_attention(fault, splits, monkeypatch):
    planted = plan_faults.plant(monkeypatch, fault)
    problem = make_problem(TREE, HEADS)
    made = planner(HEADS, "naive") if splits else Planner(HEADS, num_sms=16)
    executor = loaded(problem, made.plan(problem.paths))
    if fault == "skip_append":
        assert_attention(problem, run(executor, problem)[0])
    slots = problem.grow(torch.Generator().manual_seed(0))
    executor.append(problem.seq_lens, slots)
    with pytest.raises(AssertionError):
        assert_attention(problem, run(executor, problem)[0])
    assert planted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_comparison_finds_a_missing_append(dtype):
    """Forgotten: the entry is poison. Forgotten after a longer request held it: a stale slot."""
    problem = make_problem(TREE, HEADS, dtype)
    made = loaded(problem, planner(HEADS, "naive").plan(problem.paths))
    stale = problem.last_slots()
    slots = problem.grow(torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError):
        assert_attention(problem, run(made, problem)[0])
    made.append(problem.seq_lens, stale)
    with pytest.raises(AssertionError):
        assert_attention(problem, run(made, problem)[0])
    made.append(problem.seq_lens, slots)
    assert_attention(problem, *run(made, problem))
