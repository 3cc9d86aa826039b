"""eval.policy_holdout: judging by hand-computed cases, and whole runs with a fake meter."""

import math
from dataclasses import replace
from datetime import date

import orjson
import pytest
import torch

from eval import report
from eval.bench_plan import Node, RadixCache, Request
from eval.policy_holdout import __main__ as command
from eval.policy_holdout import policy_text, regret
from eval.policy_holdout.holdout import judged
from sgl_prefix_attn.execute.backends.family import HOPPER, PORTABLE, Family
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.paths.radix_reader import RadixReader
from sgl_prefix_attn.paths.tree_reader import RunningBatch
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.record import RATES, Calibration, CalibrationKey, Origin
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.preparer import StepPreparer
from sgl_prefix_attn.tools.calibrate.batches import draw, prefix_lens
from sgl_prefix_attn.tools.calibrate.writing import save
from sgl_prefix_attn.tools.calibrate_command import Gpu
from sgl_prefix_attn.tools.named_gpus import server_of
from tests.support import calibrations

GPU, SMS, POOL = "NVIDIA H100 80GB HBM3", 132, 20_000
DAY = date(2026, 11, 20)
KEY = CalibrationKey(GPU, "hopper", HeadConfig(32, 8, 128), "bfloat16", 1)


def calibration(key=KEY, **changes) -> Calibration:
    """Coefficients of the right size, nothing fitted; FlashInfer's launches cost little, so that
    some batches go to it."""
    found = calibrations.calibration(key, store.versions(), SMS)
    stock = calibrations.stock_start() | {"launch": 1.0}
    fields = {"bandwidth": 2.9e6, "stock": stock, "rates": dict(vars(RATES[key.family]()))}
    return replace(found, **fields | {"origin": origin(0)} | changes)


def origin(seed: int) -> Origin:
    return Origin(seed=seed, batches=400, pool_tokens=POOL, date=DAY)


class TrueMeter:
    """Measures what a predictor says, a little off; batches in `failing` raise. Of several
    fallbacks, each takes its share of what is predicted of the first."""

    def __init__(self, failing=(), key=KEY, shares=(1.0,)):
        self.predictor = server_of(Family(key.family), calibration(key)).predictor
        self.failing, self.calls, self.shares, self.plans = failing, 0, shares, set()

    def measure(self, batch, plans):
        self.calls += 1
        self.plans.add(len(plans))
        if self.calls - 1 in self.failing:
            raise RuntimeError("planted")
        stock_us = self.predictor.stock(batch.paths.seq_lens, batch.unique_tokens)
        times = [stock_us * 1.01 * share for share in self.shares]
        return times, [plan.predicted_us * 0.99 for plan in plans]


@pytest.fixture
def calibration_file(tmp_path):
    path = tmp_path / "calibration.json"
    save(calibration(), path)
    return path


@pytest.fixture
def run(tmp_path, monkeypatch, calibration_file):
    """Run the command on a fake Hopper GPU: (exit status, result file)."""
    monkeypatch.setattr(command, "find_gpu", lambda *_: Gpu(GPU, SMS, 80 << 30, (9, 0)))

    def call(*argv, meter=None):
        meter = meter or TrueMeter()
        monkeypatch.setattr(command, "new_meter", lambda key, pool_tokens, fallbacks: meter)
        out = tmp_path / "out.json"
        chosen = [] if "--calibration" in argv else ["--calibration", str(calibration_file)]
        small = ["--batches", "20", "--pool-tokens", str(POOL)]
        if "--fallbacks" not in argv:
            small += ["--fallbacks", "flashinfer"]
        status = command.main([*argv, *small, *chosen, "--json", str(out)])
        return status, orjson.loads(out.read_bytes())

    return call


def row(stock_us, prefix_us, variant="stock", **changes):
    fields = {
        "fallback": "flashinfer", "seed": 101, "index": 0, "name": "zipf/prompt", "batch_size": 8,
        "mean_len": 100.0, "tokens": 800, "unique": 500,
        "stock_us": stock_us, "prefix_us": prefix_us, "error": None,
        "predicted_stock_us": stock_us, "predicted_prefix_us": prefix_us,
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
    assert found["slower"] == 1 and found["unshared_slower"] == 0
    assert found["over_stock"] == pytest.approx((2 * 1 / 1.04) ** (1 / 3))
    assert found["over_prefix"] == pytest.approx((0.8 * 1) ** (1 / 3))


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
    alone = row(stock_us, prefix_us, "prefix", unique=800)
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


META = {
    "setup": {"kernels": "hopper", "heads": "32/8", "head_dim": 128, "dtype": "bf16",
              "page_size": 1, "batches": 20, "seeds": [1, 2]},
    "calibration": {"source": "judged", "samples": 100},
}  # fmt: skip


def test_the_report_puts_intervals_where_they_belong():
    rows = [row(100.0, 101.0, seed=seed, unique=unique) for seed in (1, 2) for unique in (500, 800)]
    _, figures, _ = policy_text.markdown(regret.summarize(rows), META)
    mean = "| regret, geometric mean | 1.0000 | 1.0000 (1.0000 to 1.0000) | at most 1.02 |"
    assert mean in figures
    assert "| regret, worst | 1.000 |  | at most 1.10 |" in figures


def test_a_choice_is_judged_against_the_better_fallback():
    """Worked by hand: 120 us by its own fallback, 100 by the other, 125 by plans."""
    mine = row(120.0, 125.0, "stock", best_stock_us=100.0, fastest_us=100.0)
    assert regret.regret(mine) == 1.2 and regret.is_slower(mine)
    assert regret.faults(mine) == ["regret 1.200", "20.0 us slower than stock"]
    old = {name: us for name, us in mine.items() if name not in ("best_stock_us", "fastest_us")}
    assert regret.regret(old) == 1.0 and not regret.is_slower(old)


@pytest.mark.parametrize(
    ("flashinfer", "fa3", "better"),
    [(1.02, 1.02, "flashinfer"), (1.02, 1.011, "flashinfer"), (1.02, 1.0097, "fa3")],
)
def test_another_fallback_needs_a_percent_less_regret(flashinfer, fa3, better):
    figures = {"flashinfer": {"regret": flashinfer}, "fa3": {"regret": fa3}}
    assert regret.better_fallback(figures) == better
    assert regret.better_fallback(dict(reversed(figures.items()))) == better


def test_prediction_quality():
    rows = [row(100.0, 50.0, predicted_stock_us=110.0), row(100.0, 50.0, predicted_stock_us=100.0)]
    quality = regret.summarize(rows)["prediction"]
    assert quality["stock"]["rms"] == pytest.approx(math.log(1.1) / math.sqrt(2))
    assert quality["prefix"]["rms"] == 0


def test_a_failed_batch_is_counted_and_listed_but_not_judged():
    rows = [row(100.0, 50.0, "prefix"), FAILED, row(100.0, 80.0, seed=102)]
    summary = regret.summarize(rows)
    assert summary["failed"] == 1 and summary["all"]["batches"] == 2
    printed = policy_text.report(rows, summary, META)
    assert "failing batches: 2" in printed
    assert "RuntimeError: planted" in printed and "regret 1.250" in printed
    nothing = regret.summarize([FAILED])
    assert nothing["all"] is None and "planted" in policy_text.report([FAILED], nothing, META)


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
    server, variants = server_of(Family(HOPPER), store.load(calibration_file)), set()
    for batch in draw(7, 40, POOL):
        steps = StepPreparer(Settings(), server.planner, StepCounters(), predictor=server.predictor)
        lens = batch.paths.seq_lens
        running = RunningBatch(requests_of(batch.paths), RadixCache(), lens, None)
        step = steps.prepare(running)
        # its nodes in a server's order, which is also one of tiles
        read = replace(batch, paths=RadixReader().read_paths(running))
        (row,) = judged(read, {"flashinfer": server}, TrueMeter())
        assert (row["variant"], row["reason"]) == (step.decision.variant, step.decision.reason)
        assert row["predicted_prefix_us"] == step.decision.predicted.prefix_us, batch.name
        assert row["prefix_us"] == 0.99 * row["predicted_prefix_us"]
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
    assert summary["prediction"]["stock"]["rms"] == pytest.approx(math.log(1.01))
    assert summary["prediction"]["prefix"]["rms"] == pytest.approx(-math.log(0.99))
    assert result["meta"]["setup"]["pool_tokens"] == POOL
    assert "RuntimeError: planted" in capsys.readouterr().out
    assert {r["variant"] for r in result["rows"]} == {"stock", "prefix"}
    status, nothing = run("--seeds", "101", meter=TrueMeter(failing=range(20)))
    assert status == 1 and nothing["summary"]["all"] is None


@pytest.mark.parametrize(("share", "better"), [(0.9, "fa3"), (1.2, "flashinfer")])
def test_fallbacks_are_judged_beside_each_other(share, better, run, tmp_path, capsys):
    """The second one takes its share of the first one's times, whatever is predicted of it."""
    path, fa3 = tmp_path / "fa3.json", replace(KEY, fallback="fa3")
    save(calibration(fa3), path)
    options = ["--calibration", str(tmp_path / "calibration.json"), "--calibration", str(path)]
    meter = TrueMeter(shares=(1.0, share), failing=(3,))
    fallbacks = ["--fallbacks", "flashinfer,fa3"]
    _, result = run("--seeds", "101,102", *fallbacks, *options, meter=meter)
    assert meter.plans == {1}  # equal plans are timed once
    rows = result["rows"]
    assert [r["fallback"] for r in rows] == 40 * ["flashinfer", "fa3"]
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        if one["error"] is not None:
            assert other["error"] == one["error"]
            continue
        assert other["stock_us"] == share * one["stock_us"]
        stock = min(one["stock_us"], other["stock_us"])
        assert one["best_stock_us"] == other["best_stock_us"] == stock
        assert one["fastest_us"] == min(stock, one["prefix_us"], other["prefix_us"])
    assert sum(r["error"] is not None for r in rows) == 2
    summary = result["summary"]
    figures = summary["fallbacks"]
    assert figures["flashinfer"] == summary["all"] and figures["fa3"]["batches"] == 39
    worse = "flashinfer" if better == "fa3" else "fa3"
    assert figures[worse]["regret"] > 1.01 * figures[better]["regret"]
    assert result["meta"]["calibration"]["key"]["fallback"] == "flashinfer"
    [other] = result["meta"]["other_calibrations"]
    assert other["key"]["fallback"] == "fa3" and str(path) in other["message"]
    assert f"less regret by 1%): {better}." in capsys.readouterr().out


@pytest.mark.parametrize("kernels", [HOPPER, PORTABLE])
def test_either_family_is_judged(kernels, run, tmp_path):
    key, path = replace(KEY, family=kernels), tmp_path / "its.json"
    save(calibration(key), path)
    asked = ["--kernels", kernels if kernels == PORTABLE else "auto"]
    _, result = run(*asked, "--seeds", "101", "--calibration", str(path), meter=TrueMeter(key=key))
    assert result["meta"]["setup"]["kernels"] == kernels
    assert result["meta"]["calibration"]["rates"] == vars(RATES[kernels]())
    assert result["summary"]["prediction"]["prefix"]["rms"] == pytest.approx(-math.log(0.99))
    assert f"{kernels} kernels" in report.markdown([("x.json", result)])


def test_the_seed_in_a_calibration_s_record_is_refused(run, calibration_file, capsys):
    made = calibration(origin=origin(103))
    save(made, calibration_file)
    with pytest.raises(SystemExit):
        run("--seeds", "101,103")
    assert "seed 103 is not held out" in capsys.readouterr().err
    assert run("--seeds", "101")[1]["meta"]["calibration"]["origin"]["seed"] == 103


def test_without_a_file_it_is_the_calibration_of_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = calibration(origin=origin(777))
    path = store.cache_folder() / store.file_name(KEY)
    save(found, path)
    measured = command._calibration([], KEY, SMS)
    assert measured.calibration == found and str(path) in measured.message
    path.unlink()
    assert command._calibration([], KEY, SMS).calibration.source == "judged"


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    def find_gpu(fallbacks):
        raise ValueError("no GPU here")

    monkeypatch.setattr(command, "find_gpu", find_gpu)
    with pytest.raises(SystemExit):
        command.main(["--seeds", "101"])
    assert "no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seeds=0"], "seed"),
        (["--seeds=-1"], "seed"),
        (["--seeds", "101,100"], "seed 100 is not held out"),
        (["--seeds", "101,101"], "seeds must differ"),
        ([], "required: --seeds"),
        (["--seeds=101", "--heads", "32"], "heads must be like 32/8"),
        (["--seeds=101", "--heads", "64/8"], "it is for"),
        (["--seeds=101", "--calibration", "nowhere.json"], "nowhere.json"),
        (["--seeds=101", "--kernels", "packs"], "--kernels"),
    ],
)
def test_bad_arguments(run, argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_the_report_has_a_table(run):
    _, result = run("--seeds", "101,102", meter=TrueMeter(failing=(3,)))
    table = report.markdown([("policy.json", result)])
    assert f"| regret, geometric mean | {result['summary']['all']['regret']:.4f} | " in table
    assert "20 batches of each of the seeds 101, 102" in table and "| groups | 10 |" in table
