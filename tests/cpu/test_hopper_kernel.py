"""The row-tile kernel's own source, emulated on a CPU: full attention over tiny plans, NaN that
stays with its request, and faults in its source that must be found."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support import emulated_gluon, running
from tests.support.emulated_hopper import EmulatedHopper
from tests.support.forests import path_table
from tests.support.poison import NAN, POISONS, Poison, assert_contained, forest, poisoned
from tests.support.problems import assert_attention, make_problem
from tests.support.sinks import sinks_of

CTAS = 3  # several items each
BITS, RANGES = HeadConfig(4, 1, 64), HeadConfig(2, 2, 64)
HEADS = (BITS, RANGES, HeadConfig(7, 1, 128), HeadConfig(2, 1, 256))
SOME_SLOW = (BITS, RANGES, *(pytest.param(heads, marks=pytest.mark.slow) for heads in HEADS[2:]))


def problem_of(heads, paths=None, **options):
    return make_problem(paths or forest(90), heads, torch.bfloat16, **options)


def plans_of(problem, ctas=CTAS):
    """One whole and one in most parts."""
    planner = Planner(problem.heads, num_sms=2 * ctas, headroom=3)
    return running.whole_and_split(planner, build_forest(problem.paths))


def executor_of(problem, plan, faults=()):
    return running.emulated(EmulatedHopper, problem, plan, CTAS, faults)


def attend(problem, plan, faults=(), executor=None):
    executor = executor or executor_of(problem, plan, faults)
    out = torch.full_like(problem.q, math.nan)
    lse = torch.full(out.shape[:2], math.nan)
    executor.run(problem.layer(out, out_lse=lse))
    assert not executor.workspace.counters.any(), "the next launch starts from counters of 0"
    return out, lse


@pytest.mark.parametrize("heads", SOME_SLOW, ids=str)
def test_tiny_plans_are_full_attention(heads):
    problem = problem_of(heads, soft_cap=20.0 if heads is BITS else 0.0)
    for plan in plans_of(problem):
        assert_attention(problem, *attend(problem, plan))


@pytest.mark.slow
def test_growth():
    check_growth(problem_of(RANGES))


def check_growth(problem):
    generator = torch.Generator().manual_seed(0)
    plan = plans_of(problem)[-1]
    executor = executor_of(problem, plan)
    for _ in range(2):
        slots = problem.grow(generator)
        executor.append(problem.seq_lens, slots)
    assert_attention(problem, *attend(problem, plan, executor=executor))
    bad = poisoned(problem, Poison("v", NAN, 4, lambda n: n - 1))
    assert_contained(problem, bad, *attend(bad, plan, executor=executor))
    assert_attention(problem, *attend(problem, plan, executor=executor))


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # inf - inf
@pytest.mark.parametrize("heads", SOME_SLOW, ids=str)
@pytest.mark.parametrize(
    "name",
    ["private V", "K of the root", pytest.param("infinite private K", marks=pytest.mark.slow)],
)
def test_a_nan_stays_with_its_requests(name, heads):
    problem = problem_of(heads)
    bad = poisoned(problem, POISONS[name])
    for plan in plans_of(problem):
        assert_contained(problem, bad, *attend(bad, plan))


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_sinks_join_each_row_once(heads):
    problem = problem_of(heads, soft_cap=20.0 if heads is BITS else 0.0)
    problem.sinks = sinks_of(heads)
    for plan in plans_of(problem):
        assert_attention(problem, *attend(problem, plan))


@pytest.mark.long
def test_growth_with_sinks():
    problem = problem_of(RANGES)
    problem.sinks = sinks_of(RANGES).bfloat16()  # as models have them
    plan = plans_of(problem)[-1]
    executor = executor_of(problem, plan)
    executor.append(problem.seq_lens + 1, problem.grow(torch.Generator().manual_seed(0)))
    assert_attention(problem, *attend(problem, plan, executor=executor))


@pytest.mark.long
def test_a_nan_stays_with_its_requests_where_there_are_sinks():
    problem = problem_of(BITS)
    problem.sinks = sinks_of(BITS)
    for name in ("private V", "K of the root"):
        bad = poisoned(problem, POISONS[name])
        for plan in plans_of(problem):
            assert_contained(problem, bad, *attend(bad, plan))


# --- what must be found ---------------------------------------------------------------------------
# two requests share a node, and the third one's tokens stand in the block of their own tokens
SMALL = path_table([(-1, 64)], [0, 0, -1], [3, 5, 9])

MASKS = {
    "one row less": ("keep_visible", "row[:, None] >= ", "row[:, None] > "),
    "one row more": ("keep_visible", "row[:, None] < ", "row[:, None] <= "),
    "the query before": ("keep_visible", "row // GROUP", "row // GROUP - 1"),
    "no mask": ("consume", "(flags & MASKED) != 0", "(flags & MASKED) == 5"),
}


@pytest.mark.parametrize("fault", MASKS)
def test_a_wrong_mask_is_found(fault):
    problem = problem_of(BITS if fault == "the query before" else RANGES, SMALL)
    planner = Planner(problem.heads, num_sms=CTAS, headroom=3)
    plan = planner.plan(problem.paths)
    assert_attention(problem, *attend(problem, plan))
    with pytest.raises(AssertionError):
        assert_attention(problem, *attend(problem, plan, [MASKS[fault]]))


CLEANING = {
    "nothing is cleaned": ("produce_cleaned", "clean(k, v, values_of(rings, stage, S), S)", "0"),
    "keys are left": ("clean", "finite[:, None], b_k, nan", "finite[:, None], b_k, b_k"),
    "values are left": ("clean", "b_v, gl.zeros_like(b_v)", "b_v, b_v"),
    "nothing runs again": ("must_run_again", "is_tainted(rings, 0, WARPS) |", "0 *"),
    "parts that are not clean count": ("consume", "(turns < counted) == (runs == 0)", "runs == 0"),
    "parts count twice": ("consume", "(turns < counted) == (runs == 0)", "1 == 1"),
    "the first product is not by zeros": (
        "consume", "S.STAGES, S).store(gl.zeros(", "S.STAGES, S).store(float('nan') + gl.zeros(",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("fault", CLEANING)
def test_a_fault_of_the_second_run_is_found(fault, monkeypatch):
    monkeypatch.setattr(emulated_gluon, "LONGEST_WAIT_S", 2)  # for a part that never comes
    problem = problem_of(RANGES)
    bad = poisoned(problem, POISONS["private V"])
    plan = plans_of(problem)[-1]
    with pytest.raises(AssertionError):
        for _ in range(20):  # some are races, which other threads may happen to win
            assert_contained(problem, bad, *attend(bad, plan, [CLEANING[fault]]))


_JOIN = "with_sink(inv, row_max, total, sinks_ptr, head, {}, S)"
_SINK = "gl.load(sinks_ptr + head * S.GROUP + row % S.GROUP).to(gl.float32)"
SINKS = {
    "in each part": (
        "store_results",
        "if parts == 1:",
        f"if parts > 1: inv, row_max, total = {_JOIN.format('base + offs_o')}\n    if parts == 1:",
    ),
    "of the next head": ("with_sink", "row % S.GROUP", "(row + 1) % S.GROUP"),
    "left out of the merge": ("merge_rows", _JOIN.format("r + offs_l"), "inv, row_max, total"),
    "left out of a whole tile": (
        "store_results", _JOIN.format("base + offs_o"), "inv, row_max, total",
    ),
    "inside the soft cap": (
        "with_sink", f"{_SINK} * LOG2_E", f"soft_cap({_SINK}, 1 / 20.0, 20.0 * LOG2_E)",
    ),
    "scaled": ("with_sink", f"{_SINK} * LOG2_E", _SINK),
    "not in the maximum": ("with_sink", "gl.maximum(row_max, sink)", "row_max"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SINKS)
def test_a_wrong_sink_is_found(fault):
    problem = problem_of(BITS, soft_cap=20.0)
    problem.sinks = sinks_of(BITS)
    whole, parts = plans_of(problem)
    plan = whole if fault == "left out of a whole tile" else parts
    with pytest.raises(AssertionError):
        assert_attention(problem, *attend(problem, plan, [SINKS[fault]]))
