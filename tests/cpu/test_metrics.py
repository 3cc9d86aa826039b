"""What /metrics and the log say about decode steps, against numbers counted by hand."""

import logging
import time
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from sgl_prefix_attn.metrics.counters import EXTENDED, KvSize, StepCounters
from sgl_prefix_attn.metrics.decode_log import DecodeLog
from sgl_prefix_attn.metrics.exporter import PrometheusExporter
from sgl_prefix_attn.metrics.intervals import StepIntervals
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.policy import STOCK_STEPS
from tests.support.fake_sglang import LMCRadixCache
from tests.support.steps import Failing, Times, preparer, run, shared_world

# Three layers with 2 KV heads of 32, one with other head dims; bf16.
LAYER = SimpleNamespace(tp_k_head_num=2, tp_v_head_num=2, qk_head_dim=32, v_head_dim=32)
WIDE_K = SimpleNamespace(tp_k_head_num=2, tp_v_head_num=2, qk_head_dim=48, v_head_dim=32)
SIZE = KvSize.of([LAYER] * 3 + [WIDE_K], itemsize=2)


@pytest.fixture
def world():
    return shared_world()


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def value(registry):
    """Value of a metric by its name without the prefix, and labels."""
    return lambda name, **labels: registry.get_sample_value(f"sglang:prefix_attn_{name}", labels)


def exported(registry, *args, **options):
    return preparer(*args, counters=StepCounters(PrometheusExporter(SIZE, registry)), **options)


def test_the_size_of_a_token_is_k_and_v_of_all_layers():
    assert SIZE == KvSize(num_layers=4, token_bytes=2 * (3 * (2 * 32 + 2 * 32) + 2 * 48 + 2 * 32))


def test_steps_are_exported_by_variant_and_reason(world, registry, value):
    steps = exported(registry)
    run(steps, world, 1)
    run(steps, world, 2)
    run(steps, world, 3, LMCRadixCache())
    steps.counters.mismatch()
    assert value("steps_total", variant="prefix", reason="default") == 2
    assert value("steps_total", variant="stock", reason="tree:LMCRadixCache") == 1
    assert value("check_mismatches_total") == 1
    assert {(d.variant, d.reason): count for d, count in steps.counters.steps.items()} == {
        ("prefix", "default"): 2,
        ("stock", "tree:LMCRadixCache"): 1,
    }


def test_kv_is_exported_in_bytes_of_all_layers_and_in_tokens_of_one(world, registry, value):
    steps = exported(registry)
    run(steps, world, 1)
    run(steps, world, 2)
    run(steps, world, 3, LMCRadixCache())  # its tree is not read: nothing is known to be shared
    tokens = {
        "read": 40 + 4 * 2 + 40 + 4 * 3 + 4 * 44,
        "query_centric": 4 * (42 + 43 + 44),
        "unique": 40 + 4 * 2 + 40 + 4 * 3,
    }
    token_bytes = (3 * 4 * 32 + 2 * (48 + 32)) * 2
    for kind, count in tokens.items():
        assert value("kv_tokens_total", kind=kind) == count
        assert value("kv_bytes_total", kind=kind) == count * token_bytes


def test_the_share_of_kv_that_was_saved_is_that_of_the_last_interval(world, registry, value):
    exporter = PrometheusExporter(SIZE, registry)
    steps = preparer(counters=StepCounters(exporter, DecodeLog(2, SIZE)))
    run(steps, world, 1)
    assert value("kv_saved_share") == 0
    run(steps, world, 2)
    # (40 + 4 * 2) + (40 + 4 * 3) of 4 * (42 + 43) tokens
    assert value("kv_saved_share") == pytest.approx(1 - 100 / 340)
    run(steps, world, 3, LMCRadixCache())
    assert value("kv_saved_share") == pytest.approx(1 - 100 / 340)
    run(steps, world, 4, LMCRadixCache())
    assert value("kv_saved_share") == 0


def test_every_metric_says_whose_it_is(world, registry):
    labels = {"model_name": "llama", "tp_rank": 0}
    exporter = PrometheusExporter(SIZE, registry, labels)
    steps = preparer(counters=StepCounters(exporter), predictor=Times(stock=30.0, prefix=20.0))
    for grown in (1, 2, 3, 4):
        run(steps, world, grown)
    steps.counters.fallback("fa3", "asked")
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    names = {sample.name for sample in samples}
    assert {
        "sglang:prefix_attn_kv_saved_share",
        "sglang:prefix_attn_fallback_info",
        "sglang:prefix_attn_steps_total",
        "sglang:prefix_attn_check_mismatches_total",
        "sglang:prefix_attn_decode_interval_seconds_count",
    } <= names
    for sample in samples:
        assert labels.keys() <= sample.labels.keys(), sample.name
        assert (sample.labels["model_name"], sample.labels["tp_rank"]) == ("llama", "0")


def test_plans_are_exported_by_cause_with_their_parts(world, registry, value):
    steps = exported(registry, Settings(headroom=1))
    plans = [run(steps, world, grown).new_plan for grown in (1, 2, 3)]
    assert plans[1] is None
    assert value("plans_total", cause="first") == value("plans_total", cause="headroom") == 1
    made = [plans[0].stats, plans[2].stats]
    assert value("plan_tiles_total") == sum(stats.num_tiles for stats in made) > 0
    assert value("plan_work_items_total") == sum(stats.num_items for stats in made) > 0


def test_time_on_the_host_is_told_apart_by_how_the_evaluation_ended(world, registry, value):
    times = Times(stock=60.0, prefix=5.0)
    steps = exported(registry, plan_with=Failing(1), predictor=times)
    for grown in range(1, STOCK_STEPS + 1):
        run(steps, world, grown)
    assert value("plan_seconds_total", outcome="failed") > 0
    assert value("plan_seconds_total", outcome="planned") is None
    run(steps, world, STOCK_STEPS + 1)
    planned = value("plan_seconds_total", outcome="planned")
    assert planned == steps.counters.plan_seconds["planned"] > 0
    run(steps, world, STOCK_STEPS + 2)
    assert value("plan_seconds_total", outcome="planned") == planned, "a steady step"


def test_a_plan_that_is_not_run_is_a_plan(world, registry, value):
    steps = exported(registry, predictor=Times(stock=10.0, prefix=20.0))
    assert run(steps, world, 1).new_plan is None
    assert value("plans_total", cause="first") == 1
    assert value("plan_seconds_total", outcome="planned") > 0


def test_predicted_seconds_are_those_of_the_kernels_that_ran_over_all_layers(
    world, registry, value
):
    times = Times(stock=30.0, prefix=20.0)
    steps = exported(registry, predictor=times)
    run(steps, world, 1)
    run(steps, world, 2)
    run(steps, world, 3, LMCRadixCache())  # rests on no prediction
    assert value("predicted_attention_seconds_total", variant="prefix") == pytest.approx(
        2 * 4 * 20e-6
    )
    assert value("predicted_attention_seconds_total", variant="stock") == 0


def test_intervals_are_exported_until_something_else_runs(world, registry, value):
    steps = exported(registry)
    for grown in (1, 2, 3, 4):
        run(steps, world, grown)
    counted = value("decode_interval_seconds_count", variant="prefix")
    assert counted == 2
    assert value("decode_interval_seconds_sum", variant="prefix") > 0
    steps.interrupt()  # a prefill
    run(steps, world, 5)
    run(steps, world, 6)
    assert value("decode_interval_seconds_count", variant="prefix") == counted


def test_the_time_of_a_cross_checked_step_is_not_a_steps_time(world, registry, value):
    steps = exported(registry, Settings(check=True, check_every=2))
    for grown in range(1, 9):
        run(steps, world, grown)
    assert value("decode_interval_seconds_count", variant="prefix") == 0


# --- which intervals tell a step's time ----------------------------------------------------------


def intervals(*events):
    """What start() tells at each step; an event is (time, requests, variant) or "interrupt". Times
    are of a 64th of a second."""
    now = [0.0]
    made, told = StepIntervals(clock=lambda: now[0] / 64), []
    for event in events:
        if event == "interrupt":
            made.interrupt()
            continue
        now[0], reqs, variant = event
        known = made.start(reqs)
        told.append(known and (known[0], 64 * known[1]))
        made.ran(variant)
    return told


A, B, C = object(), object(), object()


STEADY = [(t, [A], "prefix") for t in range(1, 7)]
INTERVALS = {
    # With overlap scheduling it is the time of the step before, or of the prefill before that.
    "it needs the step before it, too": (
        [(1, [A], "prefix"), (3, [A], "prefix"), (6, [A], "prefix"), (10, [A], "stock")],
        [None, None, ("prefix", 3), ("prefix", 4)],
    ),
    "around a switch it is neither variant's": (
        [(t, [A], "stock" if t < 4 else "prefix") for t in range(1, 8)],
        [None, None, *[("stock", 1)] * 2, None, *[("prefix", 1)] * 2],
    ),
    "a prefill in between starts anew": (
        [*STEADY[:3], "interrupt", *STEADY[3:]],
        [None, None, ("prefix", 1)] * 2,
    ),
    "as does a pause": (
        [*STEADY[:3], *[(t + 68, [A], "prefix") for t in range(3)]],
        [None, None, ("prefix", 1), None, None, ("prefix", 1)],
    ),
    "a long step is one, too": (
        [*STEADY[:3], *[(t + 66, [A], "prefix") for t in range(1, 3)]],
        [None, None, ("prefix", 1), ("prefix", 64), ("prefix", 1)],
    ),
    "requests may leave": (
        [(1, [A, B], "prefix"), (2, [A, B], "prefix"), (3, [A], "prefix")],
        [None, None, ("prefix", 1)],
    ),
    # Idle since A ended: its KV may come from another server.
    "but not all of them": (
        [*STEADY[:3], (60, [C], "prefix"), (61, [C, B], "prefix"), (62, [C, B], "prefix")],
        [None, None, ("prefix", 1)] * 2,
    ),
}


@pytest.mark.parametrize("case", INTERVALS)
def test_which_intervals_tell_a_steps_time(case):
    events, told = INTERVALS[case]
    assert intervals(*events) == told


# --- the line in the log -------------------------------------------------------------------------


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="sgl_prefix_attn.metrics.decode_log")
    return lambda: [
        r.getMessage() for r in caplog.records if r.name == "sgl_prefix_attn.metrics.decode_log"
    ]


def test_a_line_every_interval_says_what_came_since_the_last(world, lines):
    size = KvSize(num_layers=4, token_bytes=10**6)
    steps = preparer(counters=StepCounters(decode_log=DecodeLog(2, size)))
    stats = run(steps, world, 1).new_plan.stats
    assert not lines()
    run(steps, world, 2)
    run(steps, world, 3)
    assert len(lines()) == 1
    run(steps, world, 4, LMCRadixCache())
    first, second = lines()
    assert first.startswith(
        # (40 + 4 * 2) + (40 + 4 * 3) tokens of 4 * (42 + 43), a megabyte each
        "Prefix attention, #step: 2, prefix (default): 2, KV read: 0.100 GB, "
        "KV saved: 0.240 GB (70.6%), #plan: 1 (first 1), planning (ms): "
    )
    assert first.endswith(f"last plan: {stats.num_tiles} tiles in {stats.num_items} work items")
    assert "#step: 2, prefix (default): 1, stock (tree:LMCRadixCache): 1, " in second
    # 40 + 4 * 4 and 4 * 45 tokens; without sharing 4 * (44 + 45)
    assert "KV read: 0.236 GB, KV saved: 0.120 GB (33.7%), #plan: 0, planning (ms): 0.00" in second


def test_the_time_of_extend_plans_is_not_that_of_decode(world, lines):
    counters = StepCounters(decode_log=DecodeLog(1, SIZE))
    with counters.evaluation(EXTENDED):
        time.sleep(0.001)
    run(preparer(Settings(policy="stock"), counters=counters), world, 1)
    assert "planning (ms): 0.00" in lines()[0]


def test_a_model_without_layers_of_its_own_has_a_line_all_the_same(world, lines):
    """As SGLang's Transformers backend, whose layers are no modules of the model."""
    counters = StepCounters(decode_log=DecodeLog(1, KvSize.of([], 2)))
    run(preparer(counters=counters, problem="layers:none"), world, 1)
    (line,) = lines()
    assert "stock (layers:none): 1, KV read: 0.000 GB, KV saved: 0.000 GB (0.0%)" in line


def test_the_line_tells_both_predictions_of_the_last_decision(world, lines):
    times = Times(stock=30.04, prefix=20.0)
    steps = preparer(counters=StepCounters(decode_log=DecodeLog(2, SIZE)), predictor=times)
    run(steps, world, 1)
    times.stock_us = 99.0
    world.reqs.pop()
    run(steps, world, 2)
    (line,) = lines()
    assert "prefix (predicted_faster): 2, " in line
    assert "predicted us/layer: prefix 20.0, stock 99.0, #plan: 2 (" in line
