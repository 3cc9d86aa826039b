"""The evaluation commands: help, bad arguments, and small runs that need neither GPU nor engine."""

import json
import os
import signal
import subprocess
import threading
from argparse import ArgumentTypeError
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import torch

from eval import bench_latent, bench_multi_token, bench_plan, dummy_engine, report, split_gains
from eval.bench_engine import __main__ as bench_engine
from eval.bench_engine import decode_times, host_times
from eval.bench_engine.workloads import NAMED, workload
from eval.bench_kernel import __main__ as bench_kernel
from eval.cli_values import output, several
from eval.compare_outputs import __main__ as compare_outputs
from eval.engine_process import (
    EngineError,
    EngineProcess,
    backend_arguments,
    backend_env,
    environment,
    folder_name,
    names_prefix,
    uses_prefix,
)  # fmt: skip
from eval.engine_worker import MARK
from eval.model_shapes import write_config
from eval.policy_holdout import __main__ as policy_holdout
from eval.sanitize import __main__ as sanitize
from eval.workloads import __main__ as workloads
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.records import Decision
from sgl_prefix_attn.step.preparer import Step
from tests.eval.fake_engines import fake_engines

COMMANDS = (
    bench_kernel,
    bench_plan,
    bench_engine,
    compare_outputs,
    policy_holdout,
    report,
    sanitize,
)


@pytest.mark.parametrize(
    "arguments",
    [
        [bench_kernel, "--json"], [bench_plan, "--json"],
        [policy_holdout, "--seeds", "101", "--json"], [workloads, "agent", "--traces"],
    ],
    ids=lambda arguments: arguments[0].__name__,
)  # fmt: skip
def test_a_result_that_cannot_be_written_is_refused_before_the_run(arguments, tmp_path, capsys):
    command, *options = arguments
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        command.main([*options, str(tmp_path / "file" / "out")])
    assert "file/out" in capsys.readouterr().err


def test_a_result_file_is_left_as_it_was_until_it_is_written(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "folder" / "new.json"
    old.write_text("old")
    assert output(str(old)) == str(old) and output(str(new)) == str(new)
    assert old.read_text() == "old" and new.parent.is_dir() and not new.exists()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda module: module.__name__)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    assert stop.value.code == 0 and "python -m eval." in capsys.readouterr().out


ON_CPU = ["--device", "cpu"]


@pytest.mark.parametrize(
    ("command", "argv", "says"),
    [
        (bench_kernel, [*ON_CPU, "--heads", "32/8,32"], "heads"),
        (bench_kernel, [*ON_CPU, "--heads", "5/2"], "must be a multiple"),
        (bench_kernel, [*ON_CPU, "--trees", "1_"], "'1_'"),
        (bench_kernel, [*ON_CPU, "--page-size", "0"], "--page-size"),
        (bench_kernel, [*ON_CPU, "--behind-products"], "needs a GPU"),
        (bench_multi_token, [*ON_CPU, "--heads", "5/2"], "num_qo_heads (5) must be a multiple"),
        (split_gains, ["--heads", "5/2"], "--heads: num_qo_heads (5) must be a multiple"),
        (split_gains, ["--heads", "8"], "like 32/8, got '8'"),
        (bench_engine, [*ON_CPU, "--engine-arguments", "[1]"], "--engine-arguments"),
        (bench_engine, [*ON_CPU, "--engine-arguments", "{x"], "--engine-arguments"),
        (bench_kernel, [*ON_CPU, "--providers", "nope"], "'nope'"),
        (bench_kernel, [*ON_CPU, "--providers", "prefix:nope"], "'prefix:nope'"),
        (bench_kernel, ["--device", "nope"], "--device"),
        (bench_kernel, ["--device", "cuda:1"], "expected cpu or cuda, got cuda:1"),
        (bench_kernel, ["--device", "meta"], "expected cpu or cuda, got meta"),
        (bench_latent, [*ON_CPU, "--dims", "576"], "--dims: expected two"),
        (bench_latent, [*ON_CPU, "--dims", "512,576"], "latent_dim (576) is for"),
        (bench_latent, [*ON_CPU, "--trees", "1,2_8,x"], "'1,2_8,x'"),
        (bench_engine, [*ON_CPU, "--workloads", "nope"], "'nope'"),
        (bench_engine, [*ON_CPU, "--backends", ""], "--backends: a name is missing in ''"),
        (bench_engine, [*ON_CPU, "--new-tokens", "64,32"], "--new-tokens"),
        (bench_engine, [*ON_CPU, "--model-shape", "nope"], "--model-shape"),
        (compare_outputs, ON_CPU, "what"),
        (compare_outputs, ["layers", *ON_CPU, "--page-size", "x"], "--page-size"),
        (compare_outputs, ["layers", *ON_CPU, "--fault", "nope"], "--fault"),
        (compare_outputs, ["layers", *ON_CPU, "--layers", "2"], "three layers"),
        (compare_outputs, ["layers", *ON_CPU, "--scenarios", "nope"], "'nope'"),
        (compare_outputs, ["layers", *ON_CPU, "--backends=a", "--fault=drop_node"], "is prefix"),
        (bench_plan, ["--batches=1,,2"], "--batches: '' is no integer"),
        (bench_plan, ["--batches=1.5"], "--batches: '1.5' is no integer"),
        (bench_plan, ["--batches=16,-1"], "--batches: must be at least 1, got -1"),
        (report, ["x.json", "--check"], "--check"),
        (workloads, ["agent", "--seed=-1"], "--seed: "),
        (workloads, ["agent", "--rate=0"], "--rate: must be above 0 and at most 1,000,000, got 0"),
        (workloads, ["agent", "--rate=nan"], "must be above 0 and at most 1,000,000, got nan"),
        (workloads, ["agent", "--rate=inf"], "must be above 0 and at most 1,000,000, got inf"),
        (workloads, ["agent", "--rate=x"], "--rate: 'x' is no number"),
        # Before anything starts:
        (bench_kernel, ["--device", "cuda"], "argument --device: torch "),
        (bench_engine, [], "argument --device: torch "),
        (compare_outputs, ["layers"], "argument --device: torch "),
    ],
)
def test_bad_arguments_end_with_usage(command, argv, says, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2 and says in capsys.readouterr().err.split("error:")[1]


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


def test_aligned_plans_end_where_lengths_pass_a_part_and_a_half(tmp_path):
    out, cores = tmp_path / "growth.json", os.sched_getaffinity(0)
    try:
        assert bench_plan.main(["--growth", "1100", "--json", str(out)]) == 0
    finally:
        os.sched_setaffinity(0, cores)
    rows = orjson.loads(out.read_bytes())["rows"]
    plans = {(row["requests"], row["part_tokens"]): row["plans"] for row in rows}
    assert {plans[name, 0] for name in bench_plan.GROWING} == {-(-1100 // 65)}
    # some of 16 or 64 lengths pass it, and nearly all of 256 other ones
    few, more, most = (plans[name, 2048] for name in bench_plan.GROWING)
    assert 17 < few < more < most
    assert all(row["us"] > 0 for row in rows)


def test_bench_plan_requests_hang_below_the_tree():
    tree = bench_plan.tree_of(64, 4)
    assert tree.counts == (1, 4, 16, 64) and bench_plan.tree_of(7, 1).counts == (7,)
    reqs = bench_plan.fake_requests(tree)
    lens = np.full(64, tree.seq_len + 1)
    batch = RunningBatch(reqs, bench_plan.RadixCache(), lens, None)
    paths = RadixReader().read_paths(batch)
    assert paths.length.size == sum(tree.counts) and np.bincount(paths.leaf).max() == 1
    assert reqs[0].last_node.parent is reqs[3].last_node.parent
    assert reqs[3].last_node.parent is not reqs[4].last_node.parent


def test_workloads():
    shared, odd = several(workload)("shared8k,3x16+8")
    assert shared == NAMED["shared8k"]
    prompts = odd.prompts(1024)
    assert prompts == odd.prompts(1024) and [len(ids) for ids in prompts] == [24] * 3
    assert prompts[0][:16] == prompts[1][:16] and prompts[0][16:] != prompts[1][16:]
    assert odd.kv_tokens(10) == 16 + 3 * 18
    groups = workload("2*3x16+0..8")
    prompts = groups.prompts(1024)
    assert [len(ids) for ids in prompts] == 2 * [16, 20, 24]
    assert groups.prefixes(prompts) == [prompts[0], prompts[3]] and prompts[0] != prompts[3]
    assert (groups.batch, groups.kv_tokens(10)) == (6, 2 * (16 + 12 + 30))
    assert workload("2x0+4").prefixes([[1], [2]]) == []
    lone = workload("1x0+0..8")
    assert [len(ids) for ids in lone.prompts(1024)] == [8]
    for text in ("nope", "0x1+1", "2x5+0", "0*2x5+1", "2x5+0..0", "4x0+0..8"):
        with pytest.raises(ArgumentTypeError, match="workload"):
            workload(text)


def test_engines_alternate_in_both_orders():
    calls = []

    def engine(name):
        def ask(op, ids, new_tokens):
            calls.append((name, new_tokens))
            return {"seconds": new_tokens / 1000}

        return SimpleNamespace(ask=ask)

    engines = {name: engine(name) for name in ("a", "b")}
    two = workload("2x8+4")
    prompts = two.prompts(1024)
    samples = decode_times.alternate(engines, two, prompts, (2, 6), 2)
    assert [name for name, count in calls if count == 6] == ["a", "b", "b", "a"]
    row = decode_times.times_of(samples["a"], samples["b"], (2, 6))
    assert row["tpot_ms"] == pytest.approx(1.0)


def test_host_times_counts_since_an_earlier_read(tmp_path):
    path = tmp_path / "host.json"
    assert host_times.read(path) == {}
    written = {"steps": {"prefix:default": 90, "stock:x": 2}, "plans": {"first": 1}}
    path.write_text(json.dumps(written | {"steady_steps": 89, "steady": [9.0] * 49 + [12.0] * 40}))
    before = {"steps": {"prefix:default": 50, "stock:x": 2}, "plans": {"first": 1}}
    now = host_times.read(path, before | {"steady_steps": 49})
    assert now == {
        "steps": {"prefix:default": 40}, "plans": {}, "steady_steps": 40, "steady_us": 12.0
    }  # fmt: skip
    assert host_times.read(path)["steady_us"] == 9.0
    assert host_times.read(path, before | {"steady_steps": 69})["steady_us"] is None, "only 20"
    assert host_times.read(path, before | {"steady_steps": 89})["steady_us"] is None


def test_steps_do_not_wait_for_the_disk(tmp_path, monkeypatch):
    path, free = tmp_path / "host.json", threading.Event()
    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda *args: (free.wait(5), write(*args)))
    writer = ThreadPoolExecutor(1)
    monkeypatch.setattr(host_times, "ThreadPoolExecutor", lambda threads: writer)
    times = host_times.HostTimes(path)
    for _ in range(40):
        times.prepared = Step(Decision("stock", "x"))
        times.observed(1e-5, StepCounters())
    assert not path.exists()
    free.set()
    writer.shutdown()
    assert host_times.read(path)["steps"] == {"stock:x": 32}


def test_names_of_backends_and_of_model_shapes(tmp_path):
    config = json.loads((write_config(tmp_path, "llama3.1-8b") / "config.json").read_text())
    assert config["hidden_size"] == 4096 and config["num_key_value_heads"] == 8
    assert backend_arguments("fa3") == {"attention_backend": "fa3"}
    assert backend_arguments("fa3/prefix") == {
        "prefill_attention_backend": "fa3",
        "decode_attention_backend": "prefix",
    }
    assert backend_arguments("fa3/prefix:portable") == backend_arguments("fa3/prefix")
    assert backend_arguments("prefix:hopper") == {"attention_backend": "prefix"}
    assert backend_env("prefix:portable") == {"PREFIX_ATTN_KERNELS": "portable"}
    assert backend_env("prefix") == backend_env("fa3") == {}
    assert uses_prefix("fa3/prefix:portable") and names_prefix("prefix:hopper")
    assert folder_name("fa3/prefix:portable+fa3") == "fa3-prefix-portable-fa3"
    assert uses_prefix("prefix") and uses_prefix("fa3/prefix") and not uses_prefix("prefix/fa3")
    assert names_prefix("prefix/fa3") and names_prefix("fa3/prefix") and not names_prefix("fa3")


def test_environment_of_an_engine(tmp_path):
    base = {"PYTHONPATH": "/a", "SGLANG_PLUGINS": "prefix_attn", "X": "1"}
    env = environment(base, tmp_path, ["eval_plugin", "prefix_attn"], on_cpu=False)
    assert env["SGLANG_PLUGINS"] == "eval_plugin,prefix_attn" and env["X"] == "1"
    assert env["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/a"
    assert "PREFIX_ATTN_CPU_PLATFORM" not in env
    # SGLang takes an empty list for no restriction.
    assert environment(base, tmp_path, [], on_cpu=False)["SGLANG_PLUGINS"] == "eval_plugin"
    env = environment({}, tmp_path, ["prefix_attn"], on_cpu=True)
    assert env["PREFIX_ATTN_CPU_PLATFORM"] == "1" and env["PYTHONPATH"] == str(tmp_path)
    assert env["SGLANG_PLUGINS"] == "prefix_attn,prefix_attn_cpu"


@pytest.mark.parametrize(
    ("device", "product", "plugin", "names"),
    [
        ("cuda", True, None, "prefix_attn"),
        ("cuda", False, "eval.bench_engine.host_times", "eval_plugin"),
        # The CPU platform is ours: an engine of any backend runs on it.
        ("cpu", False, None, "prefix_attn,prefix_attn_cpu"),
    ],
)
def test_an_engine_is_started_in_its_environment(
    tmp_path, monkeypatch, device, product, plugin, names
):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: started.append(kwargs))
    EngineProcess({"device": device}, tmp_path / "e", plugin=plugin, product=product)
    assert started[0]["env"]["SGLANG_PLUGINS"] == names


def test_an_engine_with_other_plugins_is_refused(tmp_path, monkeypatch):
    process = subprocess.Popen
    answer = MARK + json.dumps({"start_s": 1.0, "plugins": ["prefix_attn"]})
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **kwargs: process(["echo", answer], **kwargs)
    )
    with pytest.raises(EngineError, match=r"\['prefix_attn'\], not \[\]"):
        with EngineProcess({}, tmp_path / "stock", product=False) as engine:
            engine.wait_until_up()
    with EngineProcess({}, tmp_path / "ours") as engine:
        engine.wait_until_up()
        assert engine.plugins == ["prefix_attn"]


def test_engines_start_together_and_end_with_one_that_fails(tmp_path, monkeypatch):
    process, made = subprocess.Popen, []

    def popen(_, **kwargs):
        made.append(process(["sleep", "60"] if made else ["true"], **kwargs))
        return made[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(EngineError, match="ended with 0"):
        with dummy_engine.side_by_side(["flashinfer", "prefix"], tmp_path, {}):
            pytest.fail("an engine that ended is up")
    assert made[1].returncode == -signal.SIGKILL, "neither waited for the other"


def test_the_first_backend_may_have_other_arguments(tmp_path, monkeypatch):
    started = fake_engines(monkeypatch, lambda *_, new_tokens, **__: {"seconds": new_tokens})
    narrow, auto = (json.dumps({"kv_cache_dtype": d}) for d in ("fp8_e4m3", "auto"))
    argv = [
        *ON_CPU, "--model-shape=tiny", "--backends=fa3/prefix,prefix", "--workloads=2x8+1",
        "--engine-arguments", narrow, "--baseline-arguments", auto,
    ]  # fmt: skip
    assert bench_engine.main([*argv, "--json", str(tmp_path / "out.json")]) == 0
    dtypes = {engine.backend: engine.arguments["kv_cache_dtype"] for engine in started}
    assert dtypes == {"fa3/prefix": "auto", "prefix": "fp8_e4m3"}


def test_engine_rows_have_the_slope_of_medians_and_each_alternation():
    samples = decode_times.Samples(short=[1.0, 1.0, 9.0], long=[2.0, 2.2, 11.4])
    base = decode_times.Samples(short=[1.0, 1.0, 1.0], long=[3.0, 3.4, 3.8])
    row = decode_times.times_of(samples, base, (64, 164))
    assert (row["alternations"], row["tpot_ms"]) == (3, pytest.approx(1.2 * 10))
    assert row["ratio"] == pytest.approx(0.5) and row["baseline_tpot_ms"] == pytest.approx(24)
    assert row["each_tpot_ms"] == pytest.approx([10, 12, 24])
    assert row["baseline_each_tpot_ms"] == pytest.approx([20, 24, 28])
