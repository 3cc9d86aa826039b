"""The evaluation commands: help, bad arguments, and small runs that need neither GPU nor engine."""

import contextlib
import json
import os
import signal
import subprocess
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import torch

from eval import bench_plan, bench_stages, dummy_engine, report
from eval.ablate import __main__ as ablate
from eval.bench_engine import __main__ as bench_engine
from eval.bench_engine import decode_times, engine_plugin, host_times
from eval.bench_engine.workloads import NAMED, parse_workloads
from eval.bench_kernel import __main__ as bench_kernel
from eval.bench_trace import __main__ as bench_trace
from eval.cli_values import output
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
from eval.row_tile_fit import __main__ as row_tile_fit
from eval.sanitize import __main__ as sanitize
from eval.tune import __main__ as tune
from eval.workloads import __main__ as workloads
from sgl_prefix_attn.api.argument_checks import lengths, path_table
from sgl_prefix_attn.execute.backends import gluon_backend
from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.tile_defaults import default_tile_set
from sgl_prefix_attn.records import HeadConfig

COMMANDS = (
    ablate, bench_kernel, bench_plan, bench_stages, bench_engine, bench_trace, compare_outputs,
    policy_holdout, report, row_tile_fit, sanitize, tune,
)  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        [ablate, "--json"], [bench_kernel, "--plot"], [bench_plan, "--json"],
        [row_tile_fit, "fit", "--jsonl", "any", "--json"], [tune, "solve", "--json"],
        [policy_holdout, "--from", "any", "--plot"], [workloads, "agent", "--traces"],
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


@pytest.mark.parametrize("option", ["--head-dim 7", "--group 0", "--kv-heads -1", "--jobs 0"])
def test_tiles_of_sizes_that_cannot_be_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        tune.main(["solve", *option.split()])
    assert option.split()[0] in capsys.readouterr().err


def test_tiles_are_solved_for_every_head_dim_that_the_kernels_take():
    _, heads = tune._parse(["solve", "--head-dim", "96"])
    assert heads == HeadConfig(32, 8, 96)


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
        (bench_kernel, [*ON_CPU, "--providers", "nope"], "'nope'"),
        (bench_kernel, [*ON_CPU, "--providers", "prefix:nope"], "'prefix:nope'"),
        (bench_kernel, ["--device", "nope"], "--device"),
        (bench_stages, ON_CPU, "NVIDIA GPU"),
        (bench_stages, [*ON_CPU, "--trees", "1_"], "'1_'"),
        (bench_stages, [*ON_CPU, "--heads", "5/2"], "must be a multiple"),
        (bench_engine, [*ON_CPU, "--workloads", "nope"], "'nope'"),
        (bench_engine, [*ON_CPU, "--new-tokens", "64,32"], "--new-tokens"),
        (bench_engine, [*ON_CPU, "--model-shape", "nope"], "--model-shape"),
        (compare_outputs, ON_CPU, "what"),
        (compare_outputs, ["layers", *ON_CPU, "--page-size", "x"], "--page-size"),
        (compare_outputs, ["layers", *ON_CPU, "--fault", "nope"], "--fault"),
        (compare_outputs, ["layers", *ON_CPU, "--layers", "2"], "three layers"),
        (compare_outputs, ["layers", *ON_CPU, "--scenarios", "nope"], "'nope'"),
        (compare_outputs, ["layers", *ON_CPU, "--backends=a", "--fault=drop_node"], "is prefix"),
        (bench_plan, ["--strategy", "nope"], "--strategy"),
        (bench_trace, ON_CPU, "--trace"),
        (bench_trace, [*ON_CPU, "--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (bench_trace, [*ON_CPU, "--trace", "x", "--backends", "fa3,fa3"], "--backends"),
        (bench_trace, [*ON_CPU, "--trace", "x", "--alternations", "0"], "--alternations"),
        (bench_trace, ["--seconds=0"], "--seconds: must be above 0 and finite, got 0"),
        (bench_trace, ["--seconds=nan"], "--seconds: must be above 0 and finite, got nan"),
        (bench_trace, ["--seconds=inf"], "--seconds: must be above 0 and finite, got inf"),
        (bench_trace, ["--seconds=x"], "--seconds: 'x' is no number"),
        (bench_plan, ["--batches=1,,2"], "--batches: '' is no integer"),
        (bench_plan, ["--batches=1.5"], "--batches: '1.5' is no integer"),
        (bench_plan, ["--batches=16,-1"], "--batches: must be at least 1, got -1"),
        (report, ["x.json", "--check"], "--readme"),
        # Before anything starts:
        (bench_kernel, ["--device", "cuda"], "argument --device: torch "),
        (bench_stages, [], "argument --device: torch "),
        (bench_engine, [], "argument --device: torch "),
        (bench_trace, ["--trace", "a.jsonl"], "argument --device: torch "),
        (compare_outputs, ["layers"], "argument --device: torch "),
    ],
)
def test_bad_arguments_end_with_usage(command, argv, says, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2 and says in capsys.readouterr().err.split("error:")[1]


def test_bench_stages_leaves_out_the_words_of_other_stages():
    heads = HeadConfig(4, 2, 32)
    tile_set = default_tile_set(torch.device("cpu"), heads)
    seq_lens = lengths(np.full(8, 80))
    planner = Planner(heads, tile_set=tile_set, strategy="naive")
    plan = planner.plan(path_table([[(0, 64)]] * 8, seq_lens))

    def counts(stage):
        words = bench_stages.without(plan, tile_set, stage).words
        queues = words[L.H_QUEUES + 1 : L.H_QUEUES + 2 * len(tile_set.tiles) : 2]
        tails = sum(n for n, tile in zip(queues, tile_set.tiles, strict=True) if tile.requests)
        return int(words[L.H_NUM_MERGES]), int(tails), int(queues.sum() - tails)

    merges, tails, shared = counts("all")
    assert min(merges, tails, shared) > 0
    assert counts("forward") == (0, tails, shared)
    assert counts("tails") == (0, tails, 0)
    assert counts("shared") == (0, 0, shared)
    assert counts("empty") == (0, 0, 0)


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
    assert tree.counts == (1, 4, 16, 64) and bench_plan.tree_of(7, 1).counts == (7,)
    reqs = bench_plan.fake_requests(tree)
    lens = np.full(64, tree.seq_len + 1)
    batch = RunningBatch(reqs, bench_plan.RadixCache(), lens, None)
    paths = RadixReader().read_paths(batch)
    assert paths.length.size == sum(tree.counts) and np.bincount(paths.leaf).max() == 1
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


def test_engines_alternate_in_both_orders():
    calls = []

    def engine(name):
        def ask(op, ids, new_tokens):
            calls.append((name, new_tokens))
            return {"seconds": new_tokens / 1000}

        return SimpleNamespace(ask=ask)

    engines = {name: engine(name) for name in ("a", "b")}
    (workload,) = parse_workloads("2x8+4")
    samples = decode_times.alternate(engines, workload, 1024, (2, 6), 2, lambda text: None)
    assert [name for name, count in calls if count == 6] == ["a", "b", "b", "a"]
    assert decode_times.tpot_ms(samples["a"], (2, 6)) == pytest.approx(1.0)


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


def test_names_of_backends_and_of_model_shapes(tmp_path):
    config = json.loads((write_config(tmp_path, "llama3.1-8b") / "config.json").read_text())
    assert config["hidden_size"] == 4096 and config["num_key_value_heads"] == 8
    assert backend_arguments("fa3") == {"attention_backend": "fa3"}
    assert backend_arguments("fa3/prefix") == {
        "prefill_attention_backend": "fa3",
        "decode_attention_backend": "prefix",
    }
    assert backend_arguments("fa3/prefix:triton") == backend_arguments("fa3/prefix")
    assert backend_arguments("prefix:row_tiles") == {"attention_backend": "prefix"}
    assert backend_env("prefix:triton") == {"SGL_PREFIX_ATTN_KERNELS": "triton"}
    assert backend_env("prefix") == backend_env("fa3") == {}
    assert uses_prefix("fa3/prefix:triton") and names_prefix("prefix:row_tiles")
    assert folder_name("fa3/prefix:triton+fa3") == "fa3-prefix-triton-fa3"
    assert uses_prefix("prefix") and uses_prefix("fa3/prefix") and not uses_prefix("prefix/fa3")
    assert names_prefix("prefix/fa3") and names_prefix("fa3/prefix") and not names_prefix("fa3")


def test_environment_of_an_engine(tmp_path):
    base = {"PYTHONPATH": "/a", "SGLANG_PLUGINS": "prefix_attn", "X": "1"}
    env = environment(base, tmp_path, ["eval_plugin", "prefix_attn"], on_cpu=False)
    assert env["SGLANG_PLUGINS"] == "eval_plugin,prefix_attn" and env["X"] == "1"
    assert env["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/a"
    assert "SGL_PREFIX_ATTN_CPU_PLATFORM" not in env
    # SGLang takes an empty list for no restriction.
    assert environment(base, tmp_path, [], on_cpu=False)["SGLANG_PLUGINS"] == "eval_plugin"
    env = environment({}, tmp_path, ["prefix_attn"], on_cpu=True)
    assert env["SGL_PREFIX_ATTN_CPU_PLATFORM"] == "1" and env["PYTHONPATH"] == str(tmp_path)
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
    answer = MARK + json.dumps({"start_s": 1.0, "pool_tokens": 64, "plugins": ["prefix_attn"]})
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **kwargs: process(["echo", answer], **kwargs)
    )
    with pytest.raises(EngineError, match=r"\['prefix_attn'\], not \[\]"):
        EngineProcess({}, tmp_path / "stock", product=False).__enter__()
    with EngineProcess({}, tmp_path / "ours") as engine:
        assert (engine.pool_tokens, engine.plugins) == (64, ["prefix_attn"])


def test_engines_start_together_and_end_with_one_that_fails(tmp_path, monkeypatch):
    process, made = subprocess.Popen, []

    def popen(_, **kwargs):
        made.append(process(["sleep", "60"] if made else ["true"], **kwargs))
        return made[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(EngineError, match="ended with 0"), contextlib.ExitStack() as stack:
        engines = {
            backend: dummy_engine.start(stack, backend, tmp_path / backend, {})
            for backend in ("flashinfer", "prefix")
        }
        assert made[1].poll() is None, "neither waits for the other"
        dummy_engine.wait_until_up(engines)
    assert made[1].returncode == -signal.SIGKILL


def test_an_engine_whose_launches_overlap(tmp_path, monkeypatch):
    started = {}

    def start(stack, name, home, arguments, *, plugin=None, env=None):
        started[home.name] = (name, plugin, env.get(engine_plugin.ENV))

    monkeypatch.setattr(bench_engine, "start", start)
    monkeypatch.setattr(bench_engine, "wait_until_up", lambda engines: None)
    monkeypatch.setattr(bench_engine, "alternate", lambda *args: None)
    args = bench_engine._parse(["--device", "cpu", "--model-shape", "tiny"])[0]
    group = ["fa3", "prefix:row_tiles", "prefix:row_tiles:in_order"]
    with pytest.raises(TypeError):  # no samples
        bench_engine._run_group(group, tmp_path, args, [NAMED["one"]], (2, 6), [])
    ours = ("prefix:row_tiles", "eval.bench_engine.engine_plugin")
    assert started == {
        "fa3": ("fa3", None, None),
        "prefix-row_tiles": (*ours, None),
        "prefix-row_tiles-in_order": (*ours, "1"),
    }


@pytest.mark.parametrize("in_order", [False, True])
def test_the_plugin_of_the_benchmark_chooses_launches(in_order, monkeypatch):
    backend = gluon_backend.GluonBackend
    monkeypatch.setattr(backend, "__init__", backend.__init__)  # undone at the end
    monkeypatch.delenv(host_times.ENV, raising=False)
    if in_order:
        monkeypatch.setenv(engine_plugin.ENV, "1")
    engine_plugin.register()
    made = backend(HeadConfig(8, 2, 64), torch.float16, torch.device("cpu"), pdl=True)
    assert made.pdl != in_order


def test_engine_rows_have_the_slope_of_medians_and_each_alternation():
    args = bench_engine._parse(["--device", "cpu"])[0]
    samples = decode_times.Samples(short=[1.0, 1.0, 9.0], long=[2.0, 2.2, 11.4])
    base = decode_times.Samples(short=[1.0, 1.0, 1.0], long=[3.0, 3.4, 3.8])
    row = bench_engine._row("prefix", NAMED["one"], args, samples, (64, 164), base)
    assert (row["alternations"], row["tpot_ms"]) == (3, pytest.approx(1.2 * 10))
    assert row["ratio"] == pytest.approx(0.5)
    assert row["each_tpot_ms"] == pytest.approx([10, 12, 24])
    assert row["baseline_each_tpot_ms"] == pytest.approx([20, 24, 28])
