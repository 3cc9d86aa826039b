"""The evaluation commands: help, bad arguments, and small runs that need neither GPU nor engine."""

import json
import os

import orjson
import pytest

from eval import bench_plan, report
from eval.bench_engine import __main__ as bench_engine
from eval.bench_engine import host_times, runner
from eval.bench_engine.workloads import NAMED, parse_workloads
from eval.bench_kernel import __main__ as bench_kernel
from eval.compare_outputs import __main__ as compare_outputs
from eval.engine_process import backend_arguments, uses_prefix
from eval.model_shapes import write_config

COMMANDS = (bench_kernel, bench_plan, bench_engine, compare_outputs, report)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda module: module.__name__)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    assert stop.value.code == 0 and "python -m eval." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (bench_engine, ["--workloads", "nope"]),
        (bench_engine, ["--new-tokens", "64,32"]),
        (bench_engine, ["--model-shape", "nope"]),
        (compare_outputs, ["--scenarios", "nope"]),
        (compare_outputs, ["--page-size", "x"]),
        (compare_outputs, ["--fault", "nope"]),
        (bench_plan, ["--strategy", "nope"]),
        (report, ["x.json", "--check"]),
    ],
)
def test_bad_arguments_end_with_usage(command, argv, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2 and "error:" in capsys.readouterr().err


def test_bench_plan_prints_and_writes_medians(tmp_path, capsys):
    out = tmp_path / "plan.json"
    argv = ["--batches", "4,16", "--levels", "1,3", "--repeats", "3", "--json", str(out)]
    cores = os.sched_getaffinity(0)
    try:
        assert bench_plan.main(argv) == 0
    finally:
        os.sched_setaffinity(0, cores)
    rows = orjson.loads(out.read_bytes())["rows"]
    assert [(row["batch"], row["levels"]) for row in rows] == [(4, 1), (4, 3), (16, 1), (16, 3)]
    assert all(value > 0 for row in rows for value in row["ms"].values())
    assert "steady" in capsys.readouterr().out


def test_bench_plan_requests_hang_below_the_tree():
    tree = bench_plan.tree_of(64, 4)
    assert tree.counts == (1, 4, 16, 64)
    reqs = bench_plan.fake_requests(tree)
    for req in reqs:
        length, node = 0, req.last_node
        while node.parent is not None:
            length, node = length + len(node.value), node.parent
        assert length == req.cache_protected_len
    assert reqs[0].last_node.parent is reqs[3].last_node.parent
    assert reqs[3].last_node.parent is not reqs[4].last_node.parent


def test_workloads():
    shared, odd = parse_workloads("shared8k,3x16+8")
    assert shared == NAMED["shared8k"]
    prompts = odd.prompts(1024)
    assert prompts == odd.prompts(1024) and [len(ids) for ids in prompts] == [24] * 3
    assert prompts[0][:16] == prompts[1][:16] and prompts[0][16:] != prompts[1][16:]
    assert odd.kv_tokens(10) == 16 + 3 * 18
    for text in ("nope", "0x1+1", "2x5+0"):
        with pytest.raises(ValueError, match="workload"):
            parse_workloads(text)


def test_tpot_is_the_slope_of_medians():
    samples = runner.Samples(short=[1.0, 1.2, 9.0], long=[3.0, 3.2, 3.4])
    assert runner.tpot_ms(samples, (64, 256)) == pytest.approx((3.2 - 1.2) / 192 * 1e3)
    assert runner.each_tpot_ms(samples, (64, 256))[0] == pytest.approx(2 / 192 * 1e3)


def test_engines_alternate_in_both_orders():
    calls = []

    class Engine:
        def __init__(self, name):
            self.name = name

        def ask(self, op, ids, new_tokens):
            calls.append((self.name, new_tokens))
            return {"seconds": new_tokens / 1000}

    engines = {name: Engine(name) for name in ("a", "b")}
    (workload,) = parse_workloads("2x8+4")
    samples = runner.alternate(engines, workload, 1024, (2, 6), 2, lambda text: None)
    assert [name for name, count in calls if count == 6] == ["a", "b", "b", "a"]
    assert runner.tpot_ms(samples["a"], (2, 6)) == pytest.approx(1.0)


def test_host_times_counts_since_an_earlier_read(tmp_path):
    path = tmp_path / "host.json"
    assert host_times.read(path) == {}
    written = {"steps": {"prefix:default": 5, "stock:x": 2}, "plans": {"first": 1}}
    path.write_text(json.dumps(written | {"steady_us": 12.0}))
    before = {"steps": {"prefix:default": 3, "stock:x": 2}, "plans": {"first": 1}}
    now = host_times.read(path, before)
    assert now == {"steps": {"prefix:default": 2}, "plans": {}, "steady_us": 12.0}


def test_backend_names():
    assert backend_arguments("fa3") == {"attention_backend": "fa3"}
    assert backend_arguments("fa3/prefix") == {
        "prefill_attention_backend": "fa3",
        "decode_attention_backend": "prefix",
    }
    assert uses_prefix("prefix") and uses_prefix("fa3/prefix") and not uses_prefix("prefix/fa3")


def test_model_config_has_the_shape(tmp_path):
    folder = write_config(tmp_path / "model", "llama3.1-8b")
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_size"] == 4096 and config["num_key_value_heads"] == 8
    with pytest.raises(ValueError, match="nope"):
        write_config(tmp_path, "nope")
