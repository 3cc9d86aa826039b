"""eval.compare_outputs without an engine: the planted faults, the requests."""

import pytest
import torch

from eval.compare_outputs import faults, scenarios
from sgl_prefix_attn import plan as plan_module
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table, planner
from tests.support.problems import make_problem
from tests.support.running import executor, run

HEADS = HeadConfig(4, 2, 16)
PATHS = path_table([(-1, 32)], [0] * 3, [8, 8, 5])  # three requests on one node


def outputs():
    problem, plan = make_problem(PATHS, HEADS), planner(HEADS, "naive").plan(PATHS)
    made = executor(problem, plan)
    made.load(plan, problem.req_to_token, problem.pool)
    return run(made, problem)[0]


@pytest.mark.parametrize(
    ("fault", "rows"),
    [("drop_node", [True, True, True]), ("swap_tails", [True, True, False])],
    ids=["every row", "the two tails of equal length"],
)
def test_a_fault_changes_the_rows_that_it_should(monkeypatch, fault, rows):
    good, notes = outputs(), []
    monkeypatch.setattr(plan_module, "make_packs", plan_module.make_packs)  # undone at the end
    monkeypatch.setattr(Planner, "plan_forest", Planner.plan_forest)
    faults.FAULTS[fault](lambda: notes.append(1))
    bad = outputs()
    assert notes == [1] and torch.isfinite(bad).all()
    difference = (good - bad).abs().amax((1, 2))
    assert (difference > 0.1).tolist() == rows and (difference > 1e-3).tolist() == rows


def test_without_anything_shared_no_fault_is_noted(tmp_path, monkeypatch):
    log = tmp_path / "log"
    assert faults.times_planted(log) == 0
    monkeypatch.setenv(faults.FAULT_ENV, "swap_tails")
    monkeypatch.setenv(faults.LOG_ENV, str(log))
    monkeypatch.setattr(Planner, "plan_forest", Planner.plan_forest)
    faults.register()
    for _ in range(2):
        planner(HEADS).plan(PATHS)
    assert faults.times_planted(log) == 2


@pytest.mark.parametrize("name", list(scenarios.SCENARIOS))
def test_scenarios_are_the_same_for_every_backend(name):
    requests = scenarios.build(name, 1024, 12, scale=16)
    assert requests == scenarios.build(name, 1024, 12, scale=16)
    assert all(r["ids"] and max(r["ids"]) < 1024 and r["new_tokens"] == 12 for r in requests)


def test_scenarios_have_the_stated_sizes():
    shared = scenarios.build("shared", 32768, 64, scale=1)
    assert len(shared) == 64 and {len(request["ids"]) for request in shared} == {2176}
    assert len({tuple(request["ids"][:2048]) for request in shared}) == 1
    levels = scenarios.build("three_levels", 32768, 64, scale=1)
    nodes = [len({tuple(request["ids"][:n]) for request in levels}) for n in (1024, 1536, 1792)]
    assert nodes == [1, 4, 16] and len(levels) == 48
