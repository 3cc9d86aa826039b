"""eval.compare_outputs without an engine: the judgement, the planted faults, the requests."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval.compare_outputs import faults, judge, scenarios
from sgl_prefix_attn.execute import reference
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.tile_defaults import default_tile_set
from sgl_prefix_attn.records import HeadConfig, PathTable

HEADS = HeadConfig(4, 2, 16)


def output(tokens, gap=1.0, shift=0.0):
    """A request's output whose best log-probability is -0.5 + shift at every step."""
    top = [[(token, -0.5 + shift), (999, -0.5 + shift - gap)] for token in tokens]
    return {"tokens": list(tokens), "top": top}


def test_difference_stops_at_the_first_token_that_differs():
    a = [output([1, 2, 3, 4]), output([5, 6, 7, 8])]
    b = [output([1, 2, 9, 9], gap=0.25, shift=0.125), output([5, 6, 7, 8])]
    difference = judge.differ(a, b)
    assert (difference.requests, difference.tokens, difference.diverged) == (2, 8, 1)
    assert difference.equal_share == pytest.approx(6 / 8)
    assert difference.gaps == [[pytest.approx(1.0), pytest.approx(0.25)]]
    assert difference.max_logprob_error == pytest.approx(0.125)


@pytest.mark.parametrize("b", [[], [output([1])], [output([1, 2]), output([3, 4])]])
def test_other_requests_are_no_comparison(b):
    with pytest.raises(ValueError):
        judge.differ([output([1, 2])], b)


def near_tie(diverged, of=20):
    """Outputs of `of` requests, the first `diverged` of which part at a near-tie."""
    return [output([1, 2, 7 if i < diverged else 3, 4], gap=0.02, shift=0.004) for i in range(of)]


def test_verdict_allows_noise_and_nothing_worse():
    stock = [output([1, 2, 3, 4], gap=0.02) for _ in range(20)]
    here = judge.differ(stock, near_tie(2))
    noise = judge.noise_of([here])
    assert judge.verdict(judge.differ(stock, near_tie(3)), noise, here) == []
    one_row_wrong = [*near_tie(2)[:-1], output([1, 8, 8, 8], gap=2.0)]
    (problem,) = judge.verdict(judge.differ(stock, one_row_wrong), noise, here)
    assert "top-2 gap of 2.000" in problem
    many = judge.verdict(judge.differ(stock, near_tie(18)), noise, here)
    assert len(many) == 1 and "equal tokens" in many[0]
    shifted = [*near_tie(2)[:-1], output([1, 2, 3, 4], gap=0.02, shift=0.1)]
    (problem,) = judge.verdict(judge.differ(stock, shifted), noise, here)
    assert "log-probability error 0.1000" in problem


def plan_of(lens=(40, 40, 37)):
    """Three requests on one node of 32 tokens."""
    return Planner(HEADS, tile_set=default_tile_set("cpu", HEADS), strategy="naive").plan(
        PathTable(
            parent=np.array([-1], np.int32),
            length=np.array([32], np.int32),
            node_id=np.array([5], np.int64),
            leaf=np.zeros(3, np.int32),
            seq_lens=np.array(lens, np.int32),
        )
    )


def run(plan, lens=(40, 40, 37)):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 16, generator=generator)
    k, v = (torch.randn(300, 2, 16, generator=generator) for _ in range(2))
    rows = torch.randperm(300, generator=generator)[:120].int().view(3, 40)
    rows[:, :32] = rows[0, :32]
    words = torch.from_numpy(plan.words)
    indices = torch.zeros(plan.num_index_slots, dtype=torch.int32)
    reference.fill_segments(words, rows, torch.arange(3), indices)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    out, _ = reference.execute(words, q, k, v, indices, seq_lens, sm_scale=0.25)
    return out


def test_dropped_node_changes_every_row(monkeypatch):
    good = run(plan_of())
    notes = []
    from sgl_prefix_attn import plan as plan_module

    monkeypatch.setattr(plan_module, "make_packs", plan_module.make_packs)
    faults.FAULTS["drop_node"](lambda: notes.append(1))
    bad = run(plan_of())
    assert notes and torch.isfinite(bad).all()
    assert ((good - bad).abs().amax((1, 2)) > 0.1).all()


def test_swapped_tails_change_two_rows(monkeypatch):
    good = run(plan_of())
    notes = []
    monkeypatch.setattr(Planner, "plan_forest", Planner.plan_forest)
    faults.FAULTS["swap_tails"](lambda: notes.append(1))
    bad = run(plan_of())
    changed = ((good - bad).abs().amax((1, 2)) > 1e-3).tolist()
    assert notes == [1] and changed == [True, True, False], "the two tails of equal length"


def test_skipped_append_leaves_the_indices(monkeypatch):
    from sgl_prefix_attn.execute.executor import PlanExecutor

    class Executor:
        workspace = SimpleNamespace(kv_indices=torch.zeros(3))

        def append(self, slot):
            self.workspace.kv_indices[1] = slot

    monkeypatch.setattr(PlanExecutor, "append", Executor.append)
    faults.FAULTS["skip_append"](lambda: None)
    executor = Executor()
    PlanExecutor.append(executor, 7)
    assert executor.workspace.kv_indices.tolist() == [0, 0, 0]


def test_without_anything_shared_no_fault_is_noted(tmp_path, monkeypatch):
    log = tmp_path / "log"
    assert faults.times_planted(log) == 0
    monkeypatch.setenv(faults.FAULT_ENV, "swap_tails")
    monkeypatch.setenv(faults.LOG_ENV, str(log))
    monkeypatch.setattr(Planner, "plan_forest", Planner.plan_forest)
    faults.register()
    plan_of()
    plan_of()
    assert faults.times_planted(log) == 2


@pytest.mark.parametrize("name", list(scenarios.SCENARIOS))
def test_scenarios_are_the_same_for_every_backend(name):
    requests = scenarios.build(name, 1024, 12, scale=16)
    assert requests == scenarios.build(name, 1024, 12, scale=16)
    for i, request in enumerate(requests):
        assert request["ids"] and max(request["ids"]) < 1024 and request["new_tokens"] >= 2
        if request["after"]:
            other, count = request["after"]
            assert other != i and 1 <= count <= requests[other]["new_tokens"]


def test_scenarios_have_the_stated_sizes():
    shared = scenarios.build("shared", 32768, 64, scale=1)
    assert len(shared) == 64 and {len(request["ids"]) for request in shared} == {2176}
    assert len({tuple(request["ids"][:2048]) for request in shared}) == 1
    groups = scenarios.build("forty_groups", 32768, 64, scale=1)
    assert len({tuple(request["ids"][:200]) for request in groups}) == 40
    with pytest.raises(ValueError, match="nope"):
        scenarios.build("nope", 32768, 64, scale=1)
