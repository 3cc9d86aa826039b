"""Decode steps of draft models over plans: eager, and in SGLang's draft graphs of two variants.

SGLang's speculative workers do not start without a GPU: rounds are run by the methods of its EAGLE
worker and its draft graph runner (fake_drafts.py).
"""

from dataclasses import replace

import pytest
import torch

from sgl_prefix_attn.engine import build_drafts, planned_drafts
from sgl_prefix_attn.engine.build import NoKernels
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.records import Decision
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.policy import LENGTHS_AWAITED, PLAN_US, STOCK_STEPS
from tests.sglang.fake_drafts import LAYERS, STEPS, Drafts
from tests.sglang.fake_graph_runner import labels
from tests.support.fake_sglang import LMCRadixCache
from tests.support.steps import Times
from tests.support.torch_hopper import as_on_hopper

PREFIX = Decision("prefix", "default")
STOCK_ROUND = ["metadata"] + ["decode"] * LAYERS * (STEPS - 1)
STOCK_REPLAY = ["out_graph", "in_graph"] + ["decode"] * LAYERS * (STEPS - 1)


@pytest.fixture(params=["portable", "hopper"])
def start(request, monkeypatch):
    """Start a server that drafts; torch runs the words of either family of kernels."""
    if request.param == "hopper":
        as_on_hopper(monkeypatch.setattr)
    return lambda *args, **options: Drafts(monkeypatch, *args, **options)


def stock_calls(drafts, **changes):
    before = len(drafts.stock.calls)
    drafts.round(**changes)
    return drafts.stock.calls[before:]


# --- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 2, 3, 5])
def test_every_step_while_lengths_jump_by_what_was_accepted(start, requests):
    drafts = start(requests)
    for accepted in (1, 3, 5, 2):
        drafts.assert_right(accepted)
    drafts.assert_right(torch.arange(requests) % 4 + 1)
    drafts.assert_right()
    assert drafts.backend.counters.drafts == {PREFIX: 6}
    assert not drafts.server.backend.counters.steps, "those are the target model's"


@pytest.mark.parametrize("steps", [2, 3, 6])
def test_rounds_of_other_lengths(start, steps):
    drafts = start(steps=steps)
    for accepted in (steps, 1, 2):
        drafts.assert_right(accepted)


def test_a_plan_knows_what_is_shared(start):
    drafts = start(5)
    drafts.assert_right()
    assert drafts.backend._steps.counters.last_plan.num_nodes == 1


@pytest.mark.parametrize(
    ("saved_us", "decision"),
    [
        (PLAN_US, Decision("prefix", "predicted_faster")),
        (0.99 * PLAN_US, Decision("stock", "saves_too_little")),
    ],
)
def test_a_round_must_save_what_its_plan_costs(monkeypatch, saved_us, decision):
    """In all layers of all its steps."""
    build = build_drafts.build
    times = Times(stock=1.0 + saved_us / (LAYERS * (STEPS - 1)), prefix=1.0)
    monkeypatch.setattr(build_drafts, "build", lambda *args: replace(build(*args), predictor=times))
    drafts = Drafts(monkeypatch)
    for _ in range(2 * STOCK_STEPS):
        drafts.round(3)
    assert drafts.backend.counters.drafts == {decision: 2 * STOCK_STEPS}
    # What stock kernels draft is not evaluated again until other requests run, whatever was
    # accepted, and then after some rounds.
    evaluated = 2 * STOCK_STEPS if decision.variant == "prefix" else 1
    assert len(times.asked) == evaluated
    drafts.world.reqs.reverse()
    drafts.grown = drafts.grown.flip(0)
    for _ in range(STOCK_STEPS):
        drafts.round()
    assert len(times.asked) == evaluated + (STOCK_STEPS if decision.variant == "prefix" else 1)


def test_other_requests_and_another_order(start):
    drafts = start(5)
    drafts.assert_right(2)
    drafts.world.reqs.reverse()
    drafts.grown = drafts.grown.flip(0)
    drafts.assert_right(3)
    del drafts.world.reqs[1], drafts.world.reqs[2]
    drafts.grown = drafts.grown[[0, 2, 4]].clone()
    drafts.assert_right()


def drop_a_token(append):
    """Of the second step."""
    steps = iter(range(1, 100))
    return lambda *args: None if next(steps) % (STEPS - 1) == 2 else append(*args)


def swap_requests(append):
    return lambda executor, lens, slots: append(executor, lens, slots.flip(0))


def one_too_short(append):
    return lambda executor, lens, slots: append(executor, lens - 1, slots)


FAULTS = (drop_a_token, swap_requests, one_too_short)


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(start, monkeypatch, fault, in_graphs):
    drafts = start()
    if in_graphs:
        drafts.capture()
    drafts.assert_right(graph=in_graphs)
    monkeypatch.setattr(PlanExecutor, "append", fault(PlanExecutor.append))
    # The round before must not have left the right slots there.
    drafts.backend.lane.executor.workspace.kv_indices.zero_()
    assert drafts.error() > 1e-3


def test_a_step_that_attends_to_one_token_less_is_found(start):
    drafts = start()
    for step in drafts.backend.attn_backends[1:]:
        step._i_step -= 1
    assert drafts.error() > 1e-3


def test_kernels_get_slots_one_after_another(start, monkeypatch):
    """SGLang's are a column of the round's; once a step, whatever the layers."""
    drafts, append, appended = start(), TorchBackend.append, []

    def noted(kernels, workspace, lens, slots):
        appended.append((lens.tolist(), slots.is_contiguous()))
        append(kernels, workspace, lens, slots)

    monkeypatch.setattr(TorchBackend, "append", noted)
    lens = drafts.schedule_batch().seq_lens
    drafts.assert_right()
    assert appended == [((lens + i).tolist(), True) for i in range(1, STEPS)]


# --- in graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 2, 3])
def test_each_size_has_a_graph_of_either_kind_and_rounds_choose(start, requests):
    drafts = start(requests)
    graphs = drafts.capture()
    assert labels(graphs) == [(n, label) for n in (4, 2, 1) for label in (None, "prefix")]
    assert drafts.stock.calls.count("out_graph:capture") == 3, "none from prefix captures"
    for accepted in (4, 1, 3):
        drafts.assert_right(accepted, graph=True)
        assert stock_calls(drafts, tree_cache=LMCRadixCache()) == STOCK_REPLAY
        assert graphs.replayed.pop().variant_label is None
    assert drafts.backend.counters.drafts == {PREFIX: 3, Decision("stock", "tree:LMCRadixCache"): 3}


def test_a_batch_larger_than_every_graph_is_eager(start):
    drafts = start(5)
    drafts.capture()
    drafts.assert_right(3)
    assert not drafts.graphs.replayed


def test_what_has_a_label_of_sglangs_own_keeps_it(start):
    """Under rejection sampling, from 0.5.19 on, greedy batches have graphs of their own."""
    drafts = start()
    graphs = drafts.capture(sizes=(4,))
    drafts.backend.variants.capturing = True
    own = {graphs._make_graph_key(4).variant_label}
    own.add(graphs._make_graph_key(4, variant_label="greedy").variant_label)
    assert own <= {"prefix", "greedy+prefix"}


def test_a_size_without_a_prefix_graph_is_stock(start):
    drafts = start(env=(("MAX_VARIANT_BS", "2"),))
    assert labels(drafts.capture()) == [
        (4, None), (2, None), (2, "prefix"), (1, None), (1, "prefix")
    ]  # fmt: skip
    assert stock_calls(drafts) == STOCK_REPLAY
    assert drafts.backend.counters.drafts == {Decision("stock", "graph_batch_size"): 1}


def test_a_capture_that_fails_leaves_the_stock_graphs(start, monkeypatch, caplog):
    drafts = start()
    monkeypatch.setattr(drafts.backend.lane.executor, "run", lambda layer: 1 / 0)
    assert labels(drafts.capture()) == [(n, None) for n in (4, 2, 1)]
    assert "draft batches of up to 4 requests run stock attention" in caplog.text
    assert stock_calls(drafts) == STOCK_REPLAY
    assert drafts.backend.counters.drafts == {Decision("stock", "graph_capture_failed"): 1}


def test_a_checked_round_runs_eagerly_over_both(start):
    drafts = start(env=(("CHECK", "1"), ("CHECK_EVERY", "2")))
    drafts.capture()
    drafts.assert_right(graph=True)
    assert stock_calls(drafts) == STOCK_ROUND and not drafts.graphs.replayed
    assert drafts.backend.counters.mismatches == LAYERS * (STEPS - 1), "the fake stock is wrong"
    drafts.assert_right(graph=True)


# --- what falls back ------------------------------------------------------------------------------


@pytest.mark.parametrize("in_graphs", [False, True])
def test_a_round_that_cannot_be_planned_is_stock_and_counted(start, monkeypatch, in_graphs):
    drafts = start()
    if in_graphs:
        drafts.capture()
    drafts.assert_right(graph=in_graphs)
    with monkeypatch.context() as patched:
        planner = type(drafts.backend._steps._planner)
        patched.setattr(planner, "plan_forest", lambda *_: 1 / 0)
        assert stock_calls(drafts) == (STOCK_REPLAY if in_graphs else STOCK_ROUND)
    for _ in range(7):  # before another try
        drafts.round()
    if in_graphs:
        drafts.graphs.replayed.clear()
    drafts.assert_right(graph=in_graphs)
    assert drafts.backend.counters.drafts == {PREFIX: 2, Decision("stock", "planner_error"): 8}


def test_rounds_that_cannot_be_read_are_stock_and_counted(start, monkeypatch):
    drafts = start()
    monkeypatch.setattr(planned_drafts, "committed", lambda *_: 1 / 0)
    assert stock_calls(drafts) == STOCK_ROUND
    assert drafts.backend.counters.drafts == {}
    assert stock_calls(drafts) == STOCK_ROUND
    assert drafts.backend.counters.drafts == {Decision("stock", "internal_error"): 1}


@pytest.mark.parametrize("how", ["unseen", "lengths"])
@pytest.mark.parametrize("in_graphs", [False, True])
def test_no_plan_for_a_round_that_was_not_seen_or_whose_lengths_are_unknown(start, how, in_graphs):
    drafts = start()
    if in_graphs:
        drafts.capture()
    drafts.assert_right()
    change = {"unseen": True} if how == "unseen" else {"forward": {"seq_lens_cpu": None}}
    assert stock_calls(drafts, **change) == (STOCK_REPLAY if in_graphs else STOCK_ROUND)
    drafts.assert_right()
    counted = {PREFIX: 2} | ({LENGTHS_AWAITED: 1} if how == "lengths" else {})
    assert drafts.backend.counters.drafts == counted


def test_a_batch_with_slots_of_its_own_is_stock_for_good(start, caplog):
    drafts = start()
    assert stock_calls(drafts, req_to_token_pool=object()) == STOCK_ROUND
    assert stock_calls(drafts) == STOCK_ROUND
    assert drafts.backend.counters.drafts == {Decision("stock", "draft_cache"): 2}


@pytest.mark.parametrize("step", range(STEPS - 1))
def test_kernels_that_fail_in_a_step_leave_the_rest_to_stock(start, monkeypatch, step):
    """Stock attention starts from the round's own positions and slots."""
    drafts = start()
    batch = drafts.schedule_batch()
    run, calls = drafts.backend.lane.executor.run, []

    def failing(layer):
        calls.append(layer)
        if len(calls) > step * LAYERS:
            raise ValueError("cannot compile")
        run(layer)

    monkeypatch.setattr(drafts.backend.lane.executor, "run", failing)
    answers = drafts.round()
    for i, out, expected in answers:
        if i < step:
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        else:
            assert (out == 7.0).all()
    ((positions, slots),) = drafts.stock.begun
    assert positions.equal(batch.seq_lens) and len(slots) == len(batch.reqs) * STEPS
    assert stock_calls(drafts) == STOCK_ROUND
    assert drafts.backend.counters.drafts == {PREFIX: 1, Decision("stock", "kernel_error"): 1}


def test_a_load_that_fails_leaves_the_round_to_stock(start, monkeypatch):
    drafts = start()
    monkeypatch.setattr(drafts.backend.lane.executor, "load", lambda *_: 1 / 0)
    assert stock_calls(drafts) == STOCK_ROUND
    assert all((out == 7.0).all() for _, out, _ in drafts.round())


def test_with_tensor_parallelism_kernels_that_fail_are_raised(start, monkeypatch):
    drafts = start(tp_size=1)
    drafts.server.parallel.tp_size = 2
    monkeypatch.setattr(drafts.backend.lane.executor, "run", lambda layer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drafts.round()


def test_a_layer_option_is_stock_for_good(start):
    drafts = start()
    drafts.options = {"sinks": torch.zeros(6)}
    assert stock_calls(drafts) == STOCK_ROUND
    drafts.options = {}
    assert stock_calls(drafts) == STOCK_ROUND
    reasons = {d.reason for d in drafts.backend.counters.drafts}
    assert reasons == {"default", "layer_option:sinks"}


REASONS = {
    "draft_tree": {"topk": 2},
    "draft_window": {"speculative_draft_window_size": 128},
    "speculative:FROZEN_KV_MTP": {"speculative_algorithm": "FROZEN_KV_MTP"},
    "forced": {"env": (("POLICY", "stock"),)},
    "torch_compile": {"enable_torch_compile": True},
    # SGLang makes draft backends where its record of ranks is the draft model's own.
    "parallel:dp_attention": {"attn_dp_size": 2},
    "parallel:pipeline": {"pp_size": 2},
}


@pytest.mark.parametrize("reason", REASONS)
def test_drafts_that_keep_sglangs_backend_and_why(start, reason, caplog):
    with caplog.at_level("INFO", logger="sgl_prefix_attn"):
        drafts = start(**REASONS[reason])
    assert not drafts.plans
    said = [m for m in caplog.messages if "the draft model runs stock kernels" in m]
    assert f"the draft model runs stock kernels ({reason})" in said[-1]


def test_kernels_that_fail_at_start_leave_drafts_to_sglang(start, monkeypatch, caplog):
    def failing(*args):
        raise NoKernels("failed_at_start")

    monkeypatch.setattr(build_drafts, "build", failing)
    with caplog.at_level("INFO", logger="sgl_prefix_attn"):
        assert not start().plans
    assert "the draft model runs stock kernels (failed_at_start)" in caplog.text


@pytest.mark.parametrize(
    ("settings", "asked", "reason"),
    [
        ({}, "flashinfer", None),
        ({}, "triton", "draft_backend:triton"),
        ({"policy": "prefix"}, "fa3", None),
    ],
)
def test_on_a_gpu_the_policy_must_fit(start, monkeypatch, settings, asked, reason):
    drafts = start(speculative_draft_attention_backend=asked)
    monkeypatch.setattr(drafts.runner, "device", "cuda")
    for name in ("dtype", "kv_cache_dtype"):
        monkeypatch.setattr(drafts.runner, name, torch.bfloat16)
    assert build_drafts.why_stock(drafts.runner, Settings(**settings)) == reason


def test_without_verification_over_plans_drafts_keep_sglangs_backend(start):
    assert not start(env=(("PREFILL", "0"),)).plans
    assert start(env=(("PREFILL", "0"),), speculative_attention_mode="decode").plans
