"""The comparison with full attention must fail where a plan or an executor is wrong."""

import math

import pytest
import torch

from eval.compare_outputs import faults
from sgl_prefix_attn.execute import reference
from sgl_prefix_attn.execute.backends.torch_row_tiles import TorchRowTiles
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.plan import row_tile_planner
from sgl_prefix_attn.records import HeadConfig
from tests.support import plan_faults
from tests.support.forests import planner
from tests.support.plan_faults import FAULTS
from tests.support.problems import assert_attention, make_problem
from tests.support.running import load, loaded, run

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = HeadConfig(8, 2, 64)
correct_stretch, correct_merge = reference._stretch, reference._merge


def off_by_one_in_splits(item, segment, length):
    found = correct_stretch(item, segment, length)
    return slice(found.start + (item[L.I_SPLIT] > 0), found.stop)


def overlapping_splits(item, segment, length):
    found = correct_stretch(item, segment, length)
    return slice(found.start - (item[L.I_SPLIT] > 0), found.stop)


def merge_with_the_wrong_base(words, partial_out, partial_lse, out, lse):
    correct_merge(words, partial_out, partial_lse * math.log(2), out, lse)


def merge_the_second_split_twice(words, partial_out, partial_lse, out, lse):
    partial_lse[0], partial_out[0] = partial_lse[1], partial_out[1]
    correct_merge(words, partial_out, partial_lse, out, lse)


EXECUTOR_FAULTS = {
    off_by_one_in_splits: "_stretch",
    overlapping_splits: "_stretch",
    merge_with_the_wrong_base: "_merge",
    merge_the_second_split_twice: "_merge",
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", [*FAULTS, *EXECUTOR_FAULTS])
def test_the_comparison_finds_a_planted_fault(fault, dtype, monkeypatch):
    problem = make_problem(plan_faults.tree(), HEADS, dtype)
    plan = planner(HEADS, "naive").plan(problem.paths)
    assert_attention(problem, *run(loaded(problem, plan), problem))
    if fault in EXECUTOR_FAULTS:
        monkeypatch.setattr(reference, EXECUTOR_FAULTS[fault], fault)
    else:
        fault(plan)
    out, lse = run(loaded(problem, plan), problem)
    for found in ((out,), (out, lse)):
        with pytest.raises(AssertionError):
            assert_attention(problem, *found)


@pytest.mark.parametrize("family", ["packs", "row_tiles"])
@pytest.mark.parametrize("fault", faults.FAULTS)
def test_each_fault_of_the_evaluation_changes_attention(fault, family, monkeypatch):
    planted = plan_faults.plant(monkeypatch, fault)
    problem = make_problem(plan_faults.tree(), HEADS)
    if family == "packs":
        made = loaded(problem, planner(HEADS, "naive").plan(problem.paths))
    else:
        plan = row_tile_planner.RowTilePlanner(HEADS, num_sms=16).plan(problem.paths)
        backend = TorchRowTiles(HEADS, problem.dtype, torch.device("cpu"))
        made = PlanExecutor(backend, Capacity.for_plans(plan))
        load(made, problem, plan)
    if fault == "skip_append":
        assert_attention(problem, run(made, problem)[0])
    slots = problem.grow(torch.Generator().manual_seed(0))
    made.append(problem.seq_lens, slots)
    with pytest.raises(AssertionError):
        assert_attention(problem, run(made, problem)[0])
    assert planted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_comparison_finds_a_missing_append(dtype):
    """Forgotten: the entry is poison. Forgotten after a longer request held it: a stale slot."""
    problem = make_problem(plan_faults.tree(), HEADS, dtype)
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
