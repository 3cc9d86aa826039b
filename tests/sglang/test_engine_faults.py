"""Planted faults: comparisons must fail, check mode must find them, serving must go on."""

import pytest

from tests.sglang.engine import STOCK, Config
from tests.sglang.test_outputs import BASE, REFERENCE

pytestmark = [pytest.mark.engine, pytest.mark.long]

WRONG = ("shared_node_dropped", "tails_swapped", "not_appended", "stock:6:11,ignore:lengths")
HARMLESS = ("planner_error", "stock:6:11", "alternate", "")
FAULTS = Config("faults", tuple(("siblings", fault) for fault in WRONG + HARMLESS))


@pytest.fixture
def expected(engines):
    return engines.run(REFERENCE, STOCK).outputs["siblings", ""]


def decisions(run, fault):
    return {(step["variant"], step["reason"]) for step in run.steps["siblings", fault]}


@pytest.mark.parametrize("fault", WRONG)
def test_the_output_comparison_fails_under_a_planted_fault(engines, expected, fault):
    run = engines.run(FAULTS)
    assert decisions(run, fault) >= {("prefix", "default")}
    assert run.outputs["siblings", fault] != expected


def test_without_a_fault_the_same_engine_is_right(engines, expected):
    run = engines.run(FAULTS)
    assert run.outputs["siblings", ""] == expected


def test_a_planner_error_costs_the_gain_and_not_the_output(engines, expected):
    run = engines.run(FAULTS)
    assert decisions(run, "planner_error") == {("stock", "planner_error")}
    assert run.outputs["siblings", "planner_error"] == expected
    assert run.log.count("fall back to stock attention (planner_error)") == 1


def test_five_stock_steps_then_a_prefix_step(engines, expected):
    run = engines.run(FAULTS)
    assert ("stock", "planner_error") not in decisions(run, "stock:6:11")  # of the one before
    steps = run.steps["siblings", "stock:6:11"]
    assert [step["variant"] for step in steps[5:12]] == ["prefix"] + ["stock"] * 5 + ["prefix"]
    assert steps[11]["causes"] == ["lengths"]
    assert steps[11]["requests"] == steps[5]["requests"]
    assert run.outputs["siblings", "stock:6:11"] == expected


def test_stock_and_prefix_steps_alternate(engines, expected):
    run = engines.run(FAULTS)
    variants = [step["variant"] for step in run.steps["siblings", "alternate"]]
    assert variants[:4] == ["prefix", "stock"] * 2
    assert run.outputs["siblings", "alternate"] == expected


def test_check_mode_finds_an_off_by_one_in_the_tree_reader(engines, expected):
    run = engines.run(BASE)
    # Only the very first step has no path yet, and so nothing to read wrongly.
    assert decisions(run, "tree_off_by_one") >= {("stock", "check_failed")}
    steps = run.steps["siblings", "tree_off_by_one"]
    assert all(s["reason"] == "check_failed" for s in steps if len(s["requests"]) == 4)
    assert run.outputs["siblings", "tree_off_by_one"] == expected
    line = next(line for line in run.log.splitlines() if "(check_failed)" in line)
    for part in ("request ", "node ", "position ", "are protected"):
        assert part in line


@pytest.mark.parametrize("fault", ["not_appended", "shared_node_dropped"])
def test_check_mode_finds_wrong_outputs_of_a_layer(engines, fault):
    run = engines.run(BASE)
    # The count of a step is recorded before the step runs.
    first, *_, last = [step["mismatches"] for step in run.steps["siblings", fault]]
    assert first < last
    assert "prefix and stock attention differ" in run.log
