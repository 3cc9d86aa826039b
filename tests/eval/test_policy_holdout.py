"""eval.policy_holdout: judging by hand-computed cases, and whole runs with a fake meter."""

import math
from dataclasses import replace
from datetime import date
from unittest.mock import create_autospec

import orjson
import pytest
import torch

from eval import bench_plan, report
from eval.bench_plan import Node, RadixCache, Request
from eval.policy_holdout import __main__ as command
from eval.policy_holdout import holdout, host, policy_text, regret
from eval.policy_holdout.coverage import coverage
from sgl_prefix_attn.calibrate import measure as meters
from sgl_prefix_attn.calibrate.batches import draw, prefix_lens
from sgl_prefix_attn.calibrate.writing import save
from sgl_prefix_attn.cli.named_gpus import server_of
from sgl_prefix_attn.execute.backends import choice
from sgl_prefix_attn.execute.backends.family import Family
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.costs import GpuRates
from sgl_prefix_attn.plan.estimate import PREFIX_COEFFICIENTS, starts
from sgl_prefix_attn.plan.tile_defaults import gpu_tile_set
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.predictor import Predictor
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey, Origin
from sgl_prefix_attn.predict.stock_time import STOCK_COEFFICIENTS
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.preparer import StepPreparer
from tests.support import calibrations

GPU, SMS, POOL = "NVIDIA H100 80GB HBM3", 132, 20_000
DAY = date(2026, 11, 20)
KEY = CalibrationKey(GPU, HeadConfig(32, 8, 128), "bfloat16", 1)


def calibration(**changes) -> Calibration:
    """Coefficients of the right size, nothing fitted; a plan's launches cost 2 us more than
    FlashInfer's."""
    stock = starts(STOCK_COEFFICIENTS)
    prefix = starts(PREFIX_COEFFICIENTS) | {"launch": stock["launch"] + 2}
    found = calibrations.calibration(KEY, store.versions(), SMS)
    fields = {
        "rates": GpuRates(bandwidth=2.9e6, mma=3e8, item=1.0, ctas=264, launch=9.0),
        "stock": stock, "prefix": prefix, "origin": origin(0),
    }  # fmt: skip
    return replace(found, **fields | changes)


def origin(seed: int) -> Origin:
    return Origin(seed=seed, batches=400, pool_tokens=POOL, date=DAY)


def planner_of(found: Calibration) -> Planner:
    return Planner(KEY.heads, tile_set=gpu_tile_set(SMS, KEY.heads), costs=found.costs)


class TrueMeter:
    """Measures what a predictor says, a little off; batches in `failing` raise."""

    def __init__(self, failing=(), kernels="triton"):
        server = server_of(Family(kernels), KEY.heads, calibration())
        self.predictor, self.planner = server.predictor, server.planner
        self.failing, self.calls = failing, 0

    def measure(self, batch):
        self.calls += 1
        if self.calls - 1 in self.failing:
            raise RuntimeError("planted")
        stock_us = self.predictor.stock(batch.paths.seq_lens, batch.unique_tokens)
        prefix_us = self.predictor.prefix(self.planner.plan(batch.paths))
        return stock_us * 1.01, prefix_us * 0.99


@pytest.fixture
def calibration_file(tmp_path):
    path = tmp_path / "calibration.json"
    save(calibration(), path)
    return path


@pytest.fixture
def run(tmp_path, monkeypatch, calibration_file):
    """Run the command on a fake GPU: (exit status, result file)."""
    monkeypatch.setattr(command, "find_gpu", lambda: (GPU, SMS))
    monkeypatch.setattr(choice, "why_no_row_tiles", lambda *_: None)  # a Hopper GPU
    monkeypatch.setattr(host, "policy_us", lambda *_: HOST_US)

    def call(*argv, meter=None):
        meter = meter or TrueMeter()
        monkeypatch.setattr(command, "gpu_meter", lambda setup, planner: meter)
        out = tmp_path / "out.json"
        small = ["--batches", "20", "--pool-tokens", str(POOL)] if "--from" not in argv else []
        chosen = [] if "--calibration" in argv else ["--calibration", str(calibration_file)]
        if "--kernels" not in argv and "--from" not in argv:
            chosen += ["--kernels", "triton"]
        status = command.main([*argv, *small, *chosen, "--json", str(out)])
        return status, orjson.loads(out.read_bytes())

    return call


def test_the_meter_has_room_for_every_batch_of_the_setup(monkeypatch):
    new_meter = create_autospec(meters.BatchMeter)
    monkeypatch.setattr(meters, "BatchMeter", new_meter)
    given = {"dtype": "fp16", "page_size": 16, "pool_tokens": POOL}
    setup = holdout.Setup(gpu=GPU, num_sms=SMS, **{"seeds": [101], **command.DEFAULTS, **given})
    planner = planner_of(calibration())
    assert holdout.gpu_meter(setup, planner) is new_meter.return_value
    new_meter.assert_called_once_with(
        planner, dtype=torch.float16, page_size=16, pool_tokens=POOL, max_batch=256,
        device=torch.device("cuda", 0),
    )  # fmt: skip


def row(stock_us, prefix_us, variant="stock", **changes):
    fields = {
        "seed": 101, "index": 0, "name": "zipf/prompt", "batch_size": 8, "min_len": 80,
        "mean_len": 100.0, "max_len": 200, "tokens": 800, "unique": 500, "shared_share": 0.375,
        "stock_us": stock_us, "prefix_us": prefix_us, "error": None,
        "predicted_stock_us": stock_us, "predicted_prefix_us": prefix_us, "planned": True,
        "variant": variant, "reason": "predicted_faster",
    }  # fmt: skip
    return fields | changes


FAILED = row(100.0, 90.0) | {"stock_us": None, "prefix_us": None, "error": "RuntimeError: planted"}


def test_figures_of_a_case_worked_by_hand():
    rows = [
        row(100.0, 50.0, "prefix"),  # right
        row(100.0, 80.0, "stock"),  # regret 1.25
        row(100.0, 104.0, "prefix"),  # regret 1.04, 4 us slower than stock: more than 3 us
    ]
    found = regret.figures(rows)
    assert found["regret"] == pytest.approx((1.25 * 1.04) ** (1 / 3))
    assert found["worst"] == 1.25 and found["prefix_chosen"] == 2
    above = [found[f"above_{limit}"] for limit in ("1.02", "1.05", "1.10")]
    assert above == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert found["slower"] == 1 and found["unshared_slower"] == 0
    assert found["over_stock"] == pytest.approx((2 * 1 / 1.04) ** (1 / 3))
    assert found["over_prefix"] == pytest.approx((0.8 * 1) ** (1 / 3))
    assert found["oracle_over_stock"] == pytest.approx((2 * 1.25) ** (1 / 3))
    assert found["oracle_over_prefix"] == pytest.approx(1.04 ** (1 / 3))


@pytest.mark.parametrize(
    ("stock_us", "prefix_us", "shared", "unshared"),
    [
        (100.0, 102.9, False, True), (100.0, 103.1, True, True), (20.0, 21.9, False, True),
        (20.0, 22.1, True, True), (20.0, 20.9, False, False), (200.0, 201.9, False, False),
        (200.0, 202.1, False, True),
    ],
)  # fmt: skip
def test_what_counts_as_slower_than_stock(stock_us, prefix_us, shared, unshared):
    sharing = row(stock_us, prefix_us, "prefix")
    alone = row(stock_us, prefix_us, "prefix", unique=800, shared_share=0.0)
    assert regret.is_slower(sharing) == regret.is_slower(alone) == shared
    assert regret.is_unshared_slower(alone) == unshared
    assert not regret.is_unshared_slower(sharing)
    assert not regret.is_slower(alone | {"variant": "stock"})


def test_ratios_over_seeds_have_student_s_interval_of_their_logarithms():
    seeds = [{name: ratio for name in regret.RATIOS} | {"worst": 2.0} for ratio in (1.0, 2.0, 4.0)]
    found = regret.over_seeds(seeds)
    assert set(found) == set(regret.RATIOS)  # no count, no share, no maximum
    # t(0.975, 2) = 4.3027, standard error log(2) / sqrt(3)
    factor = 2 ** (4.302652730 / math.sqrt(3))
    assert found["regret"] == pytest.approx({"mean": 2.0, "low": 2 / factor, "high": 2 * factor})
    assert regret.over_seeds(seeds[:1]) == {}


def test_shares_have_wilson_s_interval():
    rows = [row(100.0, 90.0, "prefix")] * 298
    rows += [row(100.0, 104.0, "prefix"), row(100.0, 102.5, "prefix", unique=800)]
    found = regret.shares(rows)
    counts = {name: (entry["batches"], entry["of"]) for name, entry in found.items()}
    assert counts == {
        "above_1.02": (2, 300), "above_1.05": (0, 300), "above_1.10": (0, 300),
        "slower": (1, 300), "unshared_slower": (1, 1),
    }  # fmt: skip
    # None of n: 0 to z^2 / (n + z^2)
    z2 = 1.959963985**2
    assert found["above_1.10"]["low"] == 0
    assert found["above_1.10"]["high"] == pytest.approx(z2 / (300 + z2))
    assert found["unshared_slower"]["low"] == pytest.approx(1 / (1 + z2))
    assert "unshared_slower" not in regret.shares([row(100.0, 90.0)])


HOST_US = {"batch": 256, "decide": 1, "evaluate": 40, "walk": 50, "steady": 60}


def test_the_report_puts_intervals_and_limits_where_they_belong():
    rows = [row(100.0, 101.0, seed=seed, unique=unique) for seed in (1, 2) for unique in (500, 800)]
    summary = regret.summarize(rows) | {"policy_us": HOST_US}
    cells = {what: (interval, wanted) for what, _, interval, wanted in policy_text.numbers(summary)}
    assert cells["regret, geometric mean"][0] == "1.0000 (1.0000 to 1.0000)"
    assert cells["regret, worst"][0] == ""
    assert cells["share of batches above 1.10"][0] == "0.0% to 49.0% of 4 batches"
    assert cells["unshared, slower by more than 1 % and 1 us"][0] == "0.0% to 65.8% of 2 unshared"
    limits = {what: wanted for what, (_, wanted) in cells.items() if what.startswith("host")}
    wanted = [what for what, limit in limits.items() if limit]
    assert len(limits) == 4 and wanted == ["host, 256 requests: the policy alone"]


def test_prediction_quality():
    rows = [row(100.0, 50.0, predicted_stock_us=110.0), row(100.0, 50.0, predicted_stock_us=100.0)]
    quality = regret.summarize(rows)["prediction"]
    assert quality["stock"]["rms"] == pytest.approx(math.log(1.1) / math.sqrt(2))
    assert quality["stock"]["percentiles"]["p50"] == pytest.approx(1.05)
    assert quality["stock"]["percentiles"]["p100"] == pytest.approx(1.1)
    assert quality["prefix"]["rms"] == 0


def test_a_failed_batch_is_counted_and_listed_but_not_judged():
    rows = [row(100.0, 50.0, "prefix"), FAILED, row(100.0, 80.0, seed=102)]
    summary = regret.summarize(rows) | {"coverage": coverage(rows)}
    assert summary["failed"] == 1 and summary["all"]["batches"] == 2
    assert list(summary["seeds"]) == ["101", "102"]
    printed = policy_text.report(rows, summary)
    assert "failing batches: 2" in printed
    assert "RuntimeError: planted" in printed and "regret 1.250" in printed
    nothing = regret.summarize([FAILED]) | {"coverage": coverage([FAILED])}
    assert nothing["all"] is None and "planted" in policy_text.report([FAILED], nothing)


def test_coverage_counts_parts_and_names_what_is_outside():
    rows = [
        row(1.0, 1.0, batch_size=1, shared_share=0.0),
        row(1.0, 1.0, batch_size=256, shared_share=0.95, mean_len=65536.0),
        row(1.0, 1.0, batch_size=255, mean_len=63.0, index=7),
        FAILED,
    ]
    found = coverage(rows)
    assert found["inside"] == 2
    assert [entry["batch"] for entry in found["outside"]] == ["seed 101 batch 7 zipf/prompt"]
    sizes, lengths = found["parts"]["batch_size"], found["parts"]["mean_len"]
    assert sizes["1 to below 2"] == 1 and sizes["128 to 256"] == 2 and sum(sizes.values()) == 3
    assert lengths["16384 to 65536"] == 1 and sum(lengths.values()) == 2


def requests_of(paths):
    """Requests and tree nodes, as SGLang has them, for a PathTable."""
    root = Node(None, 0, torch.empty(0))
    nodes = []
    for i, (parent, length) in enumerate(zip(paths.parent, paths.length, strict=True)):
        nodes.append(Node(nodes[parent] if parent >= 0 else root, i + 1, torch.empty(int(length))))
    leaves = [nodes[leaf] if leaf >= 0 else root for leaf in paths.leaf]
    return [
        Request(leaf, int(length), i)
        for i, (leaf, length) in enumerate(zip(leaves, prefix_lens(paths), strict=True))
    ]


def test_a_row_is_what_a_server_decides_in_its_first_step(calibration_file):
    setup = holdout.Setup(gpu=GPU, num_sms=SMS, seeds=[101], **command.DEFAULTS)
    made = holdout.Holdout(setup, calibration_file)
    variants = set()
    for batch in draw(7, 40, POOL):
        steps = StepPreparer(
            Settings(), made.planner, lambda plan: True, StepCounters(), predictor=made.predictor
        )
        lens = batch.paths.seq_lens
        step = steps.prepare(RunningBatch(requests_of(batch.paths), RadixCache(), lens, None))
        row = made._judge({}, batch)
        assert (row["variant"], row["reason"]) == (step.decision.variant, step.decision.reason)
        assert row["predicted_prefix_us"] == step.decision.predicted.prefix_us, batch.name
        variants.add(row["variant"])
    assert variants == {"stock", "prefix"}


def test_a_run_judges_every_seed_and_keeps_failures(run, capsys):
    status, result = run("--seeds", "101,102", meter=TrueMeter(failing=(3, 25)))
    assert status == 0
    assert [(r["seed"], r["index"]) for r in result["rows"]] == [
        (seed, i) for seed in (101, 102) for i in range(20)
    ]
    errors = [(r["seed"], r["index"]) for r in result["rows"] if r["error"]]
    assert errors == [(101, 3), (102, 5)]
    summary = result["summary"]
    assert summary["failed"] == 2 and summary["all"]["batches"] == 38
    assert summary["all"]["worst"] < 1.12 and summary["over_seeds"]["regret"]["low"] <= 1.01
    assert summary["prediction"]["stock"]["percentiles"]["p50"] == pytest.approx(1 / 1.01)
    assert result["meta"]["setup"]["pool_tokens"] == POOL
    assert "RuntimeError: planted" in capsys.readouterr().out
    assert {r["variant"] for r in result["rows"]} == {"stock", "prefix"}
    status, nothing = run("--seeds", "101", meter=TrueMeter(failing=range(20)))
    assert status == 1 and nothing["summary"]["all"] is None


def test_what_a_server_on_hopper_runs_is_judged(run, tmp_path):
    row_tiles = TrueMeter(kernels="row_tiles")
    _, first = run("--kernels", "auto", "--seeds", "101", meter=row_tiles)
    assert first["meta"]["setup"]["kernels"] == "row_tiles"
    assert first["meta"]["calibration"]["rates"]["wide"] == row_tiles.planner.rates.wide
    quality = first["summary"]["prediction"]["prefix"]["percentiles"]
    assert [quality["p1"], quality["p99"]] == pytest.approx([1 / 0.99] * 2)
    assert "Row tiles" in report.markdown([("row_tiles.json", first)])
    stored = tmp_path / "stored.json"
    stored.write_bytes(orjson.dumps(first))
    assert run("--from", str(stored))[1]["rows"] == first["rows"]
    del first["meta"]["setup"]["kernels"]  # as before there was a choice
    stored.write_bytes(orjson.dumps(first))
    assert run("--from", str(stored))[1]["rows"] != first["rows"]


def test_stored_measurements_are_judged_again(run, tmp_path):
    _, first = run("--seeds", "101,102", meter=TrueMeter(failing=(3,)))
    stored = tmp_path / "stored.json"
    first["meta"] |= {"driver": "580.1", "versions": {"torch": "2.11.0"}}
    stored.write_bytes(orjson.dumps(first))
    status, again = run("--from", str(stored))
    assert status == 0 and again["rows"] == first["rows"]
    assert again["summary"] == first["summary"]
    assert again["meta"]["measured"] == first["meta"]
    measuring, judging = again["meta"]["command"].split(" && ")
    assert measuring == first["meta"]["command"] and f"--from {stored}" in judging
    assert again["meta"]["driver"] == "580.1" and again["meta"]["versions"] == {"torch": "2.11.0"}

    dear, found = tmp_path / "dear.json", calibration()
    save(replace(found, prefix=found.prefix | {"launch": 50.0}), dear)
    _, other = run("--from", str(stored), "--calibration", str(dear))
    assert [r["stock_us"] for r in other["rows"]] == [r["stock_us"] for r in first["rows"]]
    assert other["summary"]["all"]["prefix_chosen"] < first["summary"]["all"]["prefix_chosen"]


def test_stored_measurements_of_other_batches_are_refused(run, tmp_path, capsys):
    _, first = run("--seeds", "101")
    first["rows"][4]["tokens"] += 1
    stored = tmp_path / "stored.json"
    stored.write_bytes(orjson.dumps(first))
    for argv, message in (
        (["--from", str(stored)], "batch 4 of seed 101 had"),
        (["--from", str(stored), "--seeds", "102"], "leave them out"),
    ):
        with pytest.raises(SystemExit):
            run(*argv)
        assert message in capsys.readouterr().err


def test_the_seed_in_a_calibration_s_record_is_refused(run, calibration_file, capsys):
    made = calibration(origin=origin(103))
    save(made, calibration_file)
    with pytest.raises(SystemExit):
        run("--seeds", "101,103")
    assert "seed 103 is not held out" in capsys.readouterr().err
    assert run("--seeds", "101")[1]["meta"]["calibration"]["seed"] == 103


def test_without_a_file_it_is_the_calibration_of_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = calibration(origin=origin(777))
    path = store.cache_folder() / store.file_name(KEY)
    save(found, path)
    setup = holdout.Setup(gpu=GPU, num_sms=SMS, seeds=[101], **command.DEFAULTS)
    measured = holdout.Holdout(setup, None)
    assert measured.calibration == found and measured.calibration_seed == 777
    path.unlink()
    shipped = holdout.Holdout(setup, None)
    assert shipped.calibration.source != "measured" and shipped.calibration_seed == 0
    unknown = holdout.Holdout(replace(setup, gpu="NVIDIA X1"), None)
    assert unknown.calibration.source == "conservative" and unknown.calibration_seed is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seeds=0"], "seed"),
        (["--seeds=-1"], "seed"),
        (["--seeds", "101,100"], "seed 100 is not held out"),
        (["--seeds", "101,101"], "seeds must differ"),
        ([], "--seeds is needed"),
        (["--seeds=101", "--heads", "32"], "heads must be like 32/8"),
        (["--seeds=101", "--heads", "64/8"], "it is for"),
        (["--seeds=101", "--calibration", "nowhere.json"], "nowhere.json"),
        (["--from", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_arguments(run, argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_the_host_times_are_of_256_requests(monkeypatch):
    steps = {"walk": 0.2, "steady": 0.01}
    monkeypatch.setattr(bench_plan, "measure", lambda batch, *_: steps if batch == 256 else None)
    found = calibration()
    times = host.policy_us(Predictor(found), planner_of(found), calls=3)
    assert times["walk"] == pytest.approx(200) and times["steady"] == pytest.approx(10)
    assert times["evaluate"] > times["decide"] > 0


def test_the_report_has_a_table_and_the_plot_is_written(run, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    _, result = run("--seeds", "101,102", "--plot", str(out), meter=TrueMeter(failing=(3,)))
    table = report.markdown([("policy.json", result)])
    assert f"| regret, geometric mean | {result['summary']['all']['regret']:.4f} | " in table
    assert "20 batches of each of the seeds 101, 102" in table and "| groups | 10 |" in table
    assert out.read_bytes()[:4] == b"\x89PNG" and out.stat().st_size > 10_000
