"""eval.compare_outputs without an engine: the planted faults, the requests."""

import pytest

from eval.compare_outputs import faults, scenarios
from sgl_prefix_attn.plan import search
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table

HEADS = HeadConfig(4, 2, 16)
PATHS = path_table([(-1, 32)], [0] * 3, [8, 8, 5])  # three requests on one node


def test_faults_that_were_planted_are_counted(tmp_path, monkeypatch):
    log = tmp_path / "log"
    assert faults.times_planted(log) == 0
    monkeypatch.setenv(faults.FAULT_ENV, "swap_tails")
    monkeypatch.setenv(faults.LOG_ENV, str(log))
    monkeypatch.setattr(search, "make_tiles", search.make_tiles)  # undone
    faults.register()
    Planner(HEADS, num_sms=16).plan(PATHS)
    planted = faults.times_planted(log)
    Planner(HEADS, num_sms=16).plan(PATHS)
    assert faults.times_planted(log) == 2 * planted > 0


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
