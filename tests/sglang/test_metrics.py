"""A real engine's own metrics and log, against the steps that its probe recorded."""

import json

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from tests.sglang.engine import Config, plain

pytestmark = pytest.mark.engine

INTERVAL = 5


@pytest.fixture(scope="module")
def served(engines, tmp_path_factory):
    """(steps, value of a metric by name and labels, log)"""
    folder = tmp_path_factory.mktemp("prometheus")
    config = Config(
        "metrics",
        plain("staggered", "siblings"),
        {"enable_metrics": True, "decode_log_interval": INTERVAL},
        {"PROMETHEUS_MULTIPROC_DIR": str(folder)},
    )
    run = engines.run(config)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))

    families = {metric.name: metric for metric in registry.collect()}
    # A gauge that SGLang's scheduler keeps under its own labels; priority="" is as no label.
    (running,) = families["sglang:num_running_reqs"].samples
    whose = {name: value for name, value in running.labels.items() if value}

    def value(name, **labels):
        return registry.get_sample_value(f"sglang:prefix_attn_{name}", whose | labels)

    return [step for steps in run.steps.values() for step in steps], value, run.log


def test_the_labels_are_those_of_sglangs_own_metrics(served):
    """value() looks for them; SGLang's are no fewer than these."""
    _, value, _ = served
    assert value("check_mismatches_total") == 0
    assert 0 < value("kv_saved_share") < 1
    assert value("fallback_info", backend="torch_native", reason="device:cpu") == 1


def test_the_metrics_are_what_the_steps_did(served, model):
    steps, value, _ = served
    assert value("steps_total", variant="prefix", reason="default") == len(steps)
    shape = json.loads((model / "config.json").read_text())
    # K and V in float32.
    layer_bytes = 2 * shape["num_key_value_heads"] * shape["head_dim"] * 4
    tokens = sum(sum(step["seq_lens"]) for step in steps)
    query_centric = tokens * layer_bytes * shape["num_hidden_layers"]
    assert value("kv_bytes_total", kind="query_centric") == query_centric
    unique, read = (value("kv_bytes_total", kind=kind) for kind in ("unique", "read"))
    assert 0 < unique <= read < query_centric
    causes = [cause for step in steps for cause in step["causes"]]
    for cause in set(causes):
        assert value("plans_total", cause=cause) == causes.count(cause)
    # A tile at least a plan, and an item at least a tile.
    assert len(causes) <= value("plan_tiles_total") <= value("plan_work_items_total")
    assert 0 < value("decode_interval_seconds_count", variant="prefix") < len(steps)


def test_the_log_has_a_line_every_decode_log_interval(served):
    steps, _, log = served
    lines = [line for line in log.splitlines() if "Prefix attention, #step:" in line]
    assert len(lines) == len(steps) // INTERVAL
    assert all(f"#step: {INTERVAL}, prefix (default): {INTERVAL}, KV read:" in x for x in lines)
