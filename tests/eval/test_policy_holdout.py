"""eval.policy_holdout: judging by hand-computed cases, and whole runs with a fake meter."""

import hashlib
import math
import shlex
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import orjson
import pytest
import torch

from eval import bench_plan, report
from eval.bench_plan import Node, RadixCache, Request
from eval.policy_holdout import __main__ as command
from eval.policy_holdout import holdout, host, judge, judgements, looks, source, text
from eval.policy_holdout.coverage import coverage
from eval.policy_holdout.looks import look
from sgl_prefix_attn.calibrate import measure as meters
from sgl_prefix_attn.calibrate.batches import draw
from sgl_prefix_attn.calibrate.writing import save
from sgl_prefix_attn.metrics.counters import StepCounters
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.costs import GpuRates
from sgl_prefix_attn.plan.estimate import PREFIX_COEFFICIENTS
from sgl_prefix_attn.plan.tile_defaults import gpu_tile_set
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.derived import named_starts
from sgl_prefix_attn.predict.predictor import Predictor
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey, Origin
from sgl_prefix_attn.predict.stock_time import STOCK_COEFFICIENTS
from sgl_prefix_attn.records import HeadConfig, Prediction
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step.policy import decide
from sgl_prefix_attn.step.preparer import StepPreparer

GPU, SMS, POOL = "NVIDIA H100 80GB HBM3", 132, 20_000
DAY = date(2026, 11, 20)
KEY = CalibrationKey(GPU, HeadConfig(32, 8, 128), "bfloat16", 1)


def calibration(**changes) -> Calibration:
    """Coefficients of the right size, nothing fitted; a plan's launches cost 2 us more than
    FlashInfer's."""
    stock = named_starts(STOCK_COEFFICIENTS)
    prefix = named_starts(PREFIX_COEFFICIENTS) | {"launch": stock["launch"] + 2}
    fields = {
        "key": KEY, "versions": store.versions(), "num_sms": SMS,
        "rates": GpuRates(bandwidth=2.9e6, mma=3e8, item=1.0, ctas=264, launch=9.0),
        "stock": stock, "prefix": prefix, "samples": 400,
        "errors": {"stock": 0.03, "prefix": 0.04}, "source": "measured",
        "origin": Origin(seed=0, batches=400, pool_tokens=POOL, date=DAY),
    }  # fmt: skip
    return Calibration(**fields | changes)


def planner_of(found: Calibration) -> Planner:
    return Planner(KEY.heads, tile_set=gpu_tile_set(SMS, KEY.heads), costs=found.costs)


class TrueMeter:
    """Measures what a predictor says, a little off; batches in `failing` raise."""

    def __init__(self, failing=()):
        found = calibration()
        self.predictor, self.planner = Predictor(found), planner_of(found)
        self.failing, self.calls = failing, 0

    def measure(self, batch):
        self.calls += 1
        if self.calls - 1 in self.failing:
            raise RuntimeError("planted")
        predicted = look(self.predictor, self.planner, batch.paths).predicted
        return SimpleNamespace(
            stock_us=predicted.stock_us * 1.01, prefix_us=predicted.prefix_us * 0.99
        )


@pytest.fixture
def calibration_file(tmp_path):
    path = tmp_path / "calibration.json"
    save(calibration(), path)
    return path


@pytest.fixture
def run(tmp_path, monkeypatch, calibration_file):
    """Run the command on a fake GPU: (exit status, result file)."""
    monkeypatch.setattr(command, "find_gpu", lambda: (GPU, SMS))
    monkeypatch.setattr(host, "policy_us", lambda *_: HOST_US)

    def call(*argv, meter=None):
        meter = meter or TrueMeter()
        monkeypatch.setattr(command, "gpu_meter", lambda setup, planner: meter)
        out = tmp_path / "out.json"
        small = ["--batches", "20", "--pool-tokens", str(POOL)] if "--from" not in argv else []
        chosen = [] if "--calibration" in argv else ["--calibration", str(calibration_file)]
        status = command.main([*argv, *small, *chosen, "--json", str(out)])
        return status, orjson.loads(out.read_bytes())

    return call


def test_the_meter_has_room_for_every_batch_of_the_setup(monkeypatch):
    new_meter = create_autospec(meters.BatchMeter)
    monkeypatch.setattr(meters, "BatchMeter", new_meter)
    given = {"dtype": "fp16", "page_size": 16, "pool_tokens": POOL}
    setup = holdout.Setup(gpu=GPU, num_sms=SMS, **command.DEFAULTS | given)
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
    found = judge.figures(rows)
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
        (100.0, 102.9, False, True),
        (100.0, 103.1, True, True),
        (20.0, 21.9, False, True),
        (20.0, 22.1, True, True),
        (20.0, 20.9, False, False),
        (200.0, 201.9, False, False),
        (200.0, 202.1, False, True),
    ],
)
def test_what_counts_as_slower_than_stock(stock_us, prefix_us, shared, unshared):
    sharing = row(stock_us, prefix_us, "prefix")
    alone = row(stock_us, prefix_us, "prefix", unique=800, shared_share=0.0)
    assert judge.is_slower(sharing) == judge.is_slower(alone) == shared
    assert judge.is_unshared_slower(alone) == unshared
    assert not judge.is_unshared_slower(sharing)
    assert not judge.is_slower(alone | {"variant": "stock"})


def test_ratios_over_seeds_have_student_s_interval_of_their_logarithms():
    seeds = [{name: ratio for name in judge.RATIOS} | {"worst": 2.0} for ratio in (1.0, 2.0, 4.0)]
    found = judge.over_seeds(seeds)
    assert set(found) == set(judge.RATIOS)  # no count, no share, no maximum
    # t(0.975, 2) = 4.3027, standard error log(2) / sqrt(3)
    factor = 2 ** (4.302652730 / math.sqrt(3))
    assert found["regret"] == pytest.approx({"mean": 2.0, "low": 2 / factor, "high": 2 * factor})
    assert judge.over_seeds(seeds[:1]) == {}


def test_shares_have_wilson_s_interval():
    rows = [row(100.0, 90.0, "prefix")] * 298
    rows += [row(100.0, 104.0, "prefix"), row(100.0, 102.5, "prefix", unique=800)]
    found = judge.shares(rows)
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
    centre, half = 1 + z2 / 2, math.sqrt(z2 * (1 - 1 / 300) + z2**2 / 4)
    assert found["slower"]["low"] == pytest.approx((centre - half) / (300 + z2))
    assert found["slower"]["high"] == pytest.approx((centre + half) / (300 + z2))
    assert "unshared_slower" not in judge.shares([row(100.0, 90.0)])


HOST_US = {"batch": 256, "decide": 1, "look": 40, "walk": 50, "steady": 60}


def test_the_report_puts_intervals_and_limits_where_they_belong():
    rows = [row(100.0, 101.0, seed=seed, unique=unique) for seed in (1, 2) for unique in (500, 800)]
    summary = holdout.summarise(rows, HOST_US) | {"judgements": []}
    cells = {what: (interval, wanted) for what, _, interval, wanted in text.numbers(summary)}
    assert cells["regret, geometric mean"][0] == "1.0000 (1.0000 to 1.0000)"
    assert cells["regret, worst"][0] == ""
    assert cells["share of batches above 1.10"][0] == "0.0% to 49.0% of 4 batches"
    assert cells["unshared, slower by more than 1 % and 1 us"][0] == "0.0% to 65.8% of 2 unshared"
    limits = {what: wanted for what, (_, wanted) in cells.items() if what.startswith("host")}
    assert len(limits) == 4
    assert {what for what, wanted in limits.items() if wanted} == {
        "host, 256 requests: the policy alone"
    }


def test_prediction_quality():
    rows = [row(100.0, 50.0, predicted_stock_us=110.0), row(100.0, 50.0, predicted_stock_us=100.0)]
    quality = judge.summarise(rows)["prediction"]
    assert quality["stock"]["rms"] == pytest.approx(math.log(1.1) / math.sqrt(2))
    assert quality["stock"]["percentiles"]["p50"] == pytest.approx(1.05)
    assert quality["stock"]["percentiles"]["p100"] == pytest.approx(1.1)
    assert quality["prefix"]["rms"] == 0


def test_a_failed_batch_is_counted_and_listed_but_not_judged():
    rows = [row(100.0, 50.0, "prefix"), FAILED, row(100.0, 80.0, seed=102)]
    summary = holdout.summarise(rows, None) | {"judgements": []}
    assert summary["failed"] == 1 and summary["all"]["batches"] == 2
    assert list(summary["seeds"]) == ["101", "102"]
    printed = "\n".join(text.lines(rows, summary))
    assert "failing batches: 2" in printed
    assert "RuntimeError: planted" in printed and "regret 1.250" in printed
    nothing = holdout.summarise([FAILED], None) | {"judgements": []}
    assert nothing["all"] is None and "planted" in "\n".join(text.lines([FAILED], nothing))


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


class Counting:
    """A planner that counts its plans."""

    def __init__(self, planner):
        self.planner, self.plans = planner, 0

    def plan(self, paths):
        self.plans += 1
        return self.planner.plan(paths)


def requests_of(paths):
    """Requests and tree nodes, as SGLang has them, for a PathTable."""
    root = Node(None, 0, torch.empty(0))
    nodes = []
    for i, (parent, length) in enumerate(zip(paths.parent, paths.length, strict=True)):
        nodes.append(Node(nodes[parent] if parent >= 0 else root, i + 1, torch.empty(int(length))))
    reqs = []
    for i, leaf in enumerate(paths.leaf):
        node, total = (nodes[leaf] if leaf >= 0 else root), 0
        above = node
        while above.parent is not None:
            total, above = total + len(above.value), above.parent
        reqs.append(Request(node, total, i))
    return reqs


def test_a_look_is_what_a_server_s_first_step_decides():
    found = calibration()
    # A launch so dear that some batches are decided without a plan.
    for some in (found, replace(found, prefix=found.prefix | {"launch": 18.0})):
        predictor, planner = Predictor(some), planner_of(some)
        seen = []
        for batch in draw(7, 40, POOL):
            counting = Counting(planner)
            steps = StepPreparer(
                Settings(), counting, lambda plan: True, StepCounters(), predictor=predictor
            )
            lens = batch.paths.seq_lens
            step = steps.prepare(requests_of(batch.paths), RadixCache(), lens, None)
            seen.append(look(predictor, planner, batch.paths))
            assert step.decision == seen[-1].decision, batch.name
            assert step.decision.predicted.stock_us == seen[-1].predicted.stock_us
            assert bool(counting.plans) == seen[-1].planned
        assert {one.decision.variant for one in seen} == {"stock", "prefix"}
    assert not all(one.planned for one in seen)


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


def test_a_run_without_a_measurement_says_so(run):
    status, result = run("--seeds", "101", meter=TrueMeter(failing=range(20)))
    assert status == 1 and result["summary"]["all"] is None
    assert result["summary"]["judgements"] == []


def test_stored_measurements_are_judged_again(run, tmp_path):
    _, first = run("--seeds", "101,102", meter=TrueMeter(failing=(3,)))
    stored = tmp_path / "stored.json"
    first["meta"] |= {"driver": "580.1", "versions": {"torch": "2.11.0"}}
    stored.write_bytes(orjson.dumps(first))
    status, again = run("--from", str(stored))
    assert status == 0 and again["rows"] == first["rows"]
    assert without_history(again["summary"]) == without_history(first["summary"])
    assert again["meta"]["measured"] == first["meta"]
    assert again["meta"]["driver"] == "580.1" and again["meta"]["versions"] == {"torch": "2.11.0"}

    _, other = run("--from", str(stored), "--calibration", str(dear_calibration(tmp_path)))
    assert [r["stock_us"] for r in other["rows"]] == [r["stock_us"] for r in first["rows"]]
    assert other["summary"]["all"]["prefix_chosen"] < first["summary"]["all"]["prefix_chosen"]


def dear_calibration(folder):
    """Another calibration: prefix kernels cost more."""
    path, found = folder / "dear.json", calibration()
    save(replace(found, prefix=found.prefix | {"launch": 50.0}), path)
    return path


def without_history(summary):
    return {name: part for name, part in summary.items() if name != "judgements"}


def test_every_judgement_is_kept_in_order(run, tmp_path, calibration_file, capsys):
    out = str(tmp_path / "out.json")  # where every run writes
    _, first = run("--seeds", "101,102")
    assert "judged" not in capsys.readouterr().out
    dear = dear_calibration(tmp_path)
    run("--from", out, "--calibration", str(dear), "--note", "the time model was changed")
    _, result = run("--from", out)
    found = result["summary"]["judgements"]
    assert found[0] == first["summary"]["judgements"][0] and len(found) == 3
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (calibration_file, dear)]
    calibrations = [entry["calibration"] for entry in found]
    assert [entry["sha256"] for entry in calibrations] == [*digests, digests[0]]
    assert calibrations[1]["origin"] == str(dear)
    assert result["meta"]["calibration"]["sha256"] == digests[0]
    assert [entry["note"] for entry in found] == [None, "the time model was changed", None]
    for entry, judged in ((found[0], first), (found[2], result)):
        every = judged["summary"]["all"]
        assert (entry["regret"], entry["worst"]) == (every["regret"], every["worst"])
        assert [entry[name] for name in ("date", "commit", "dirty")] == [
            judged["meta"][name] for name in ("date", "commit", "dirty")
        ]
    printed = capsys.readouterr().out
    assert "judged 3 times" in printed and "seeds no longer unseen" in printed
    assert ": the time model was changed" in printed

    measuring, judging = result["meta"]["command"].split(" && ")
    assert measuring == first["meta"]["command"] and measuring in printed
    assert shlex.split(judging)[3:5] == ["--from", out]


def test_a_measurement_in_the_place_of_another_hands_on_its_judgements(run, tmp_path, capsys):
    run("--seeds", "101,102")
    assert len(run("--seeds", "102,103")[1]["summary"]["judgements"]) == 2
    assert "seeds no longer unseen" not in capsys.readouterr().out  # the same calibration
    assert len(run("--seeds", "104")[1]["summary"]["judgements"]) == 1

    stored = tmp_path / "out.json"
    result = orjson.loads(stored.read_bytes())
    del result["summary"]["judgements"]
    stored.write_bytes(orjson.dumps(result))
    with pytest.raises(SystemExit):
        run("--from", str(stored))
    assert "how often its batches were judged" in capsys.readouterr().err


def test_a_judgement_counts_each_slower_batch_once():
    meta = {
        "date": "today", "commit": "abc", "dirty": False,
        "calibration": {"origin": "file", "sha256": "12", "rates": {}},
    }  # fmt: skip
    rows = [
        row(100.0, 110.0, "prefix", unique=800),  # by both limits
        row(100.0, 102.0, "prefix", unique=800),  # by that of unshared batches
        row(100.0, 50.0, "prefix"),
        FAILED,
    ]
    (entry,) = judgements.add([], meta, rows, None)
    assert entry["slower"] == 2 and entry["worst"] == 1.1
    assert entry["calibration"] == {"origin": "file", "sha256": "12"}


def test_a_calibration_without_a_file_has_the_digest_of_the_file_it_would_be(calibration_file):
    from_file = judgements.sha256(calibration_file, calibration())
    assert from_file == judgements.sha256(None, calibration())
    assert from_file != judgements.sha256(None, calibration(source="shipped"))


def test_the_stored_result_says_how_often_its_seeds_were_judged():
    root = Path(judgements.__file__).parents[2]
    result = orjson.loads((root / "eval/results/policy_h100.json").read_bytes())
    found, meta = result["summary"]["judgements"], result["meta"]
    measured = meta.get("measured", meta)  # a file that was judged again says when it was measured
    assert found[0]["date"] == measured["date"]
    for entry, source_meta in ((found[0], measured), (found[-1], meta)):
        assert entry["calibration"]["sha256"] == source_meta["calibration"]["sha256"]
    assert found[-1]["worst"] == result["summary"]["all"]["worst"]
    if judgements.has_changed(found):
        assert all(entry["note"] for entry in found[1:]), "a later judgement says what changed"
        page = (root / "docs/measurements.md").read_text()
        assert (
            f"at commit {found[0]['commit']}" in page and f"worst {found[0]['worst']:.3f}" in page
        )


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


def test_swapped_predictions_worsen_the_regret(run, monkeypatch):
    _, right = run("--seeds", "101,102")

    no_bound = 1e-9

    def swapped(facts):
        stock_us, prefix_us = facts.predicted.stock_us, facts.predicted.prefix_us
        if prefix_us != no_bound:
            facts = replace(facts, predicted=Prediction(prefix_us, stock_us))
        return decide(facts)

    monkeypatch.setattr(looks, "decide", swapped)
    monkeypatch.setattr(Predictor, "least_prefix", lambda *_: no_bound)
    _, wrong = run("--seeds", "101,102")
    for name in ("regret", "worst", "above_1.10"):
        assert wrong["summary"]["all"][name] > 1.05 * right["summary"]["all"][name]
    assert wrong["summary"]["all"]["slower"] > right["summary"]["all"]["slower"]


@pytest.mark.parametrize("seeds", ["0", "101,100", "101,101", "-1"])
def test_seeds_that_are_not_held_out_are_refused(run, seeds, capsys):
    with pytest.raises(SystemExit) as stop:
        run(f"--seeds={seeds}")
    assert stop.value.code == 2 and "seed" in capsys.readouterr().err


def test_the_seed_in_a_calibration_s_record_is_refused(run, calibration_file, capsys):
    made = calibration(origin=Origin(seed=103, batches=400, pool_tokens=POOL, date=DAY))
    save(made, calibration_file)
    with pytest.raises(SystemExit):
        run("--seeds", "101,103")
    assert "seed 103 is not held out" in capsys.readouterr().err
    assert run("--seeds", "101")[1]["meta"]["calibration"]["seed"] == 103


def test_without_a_file_it_is_the_calibration_of_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = calibration(origin=Origin(seed=777, batches=400, pool_tokens=POOL, date=DAY))
    path = store.cache_folder() / store.file_name(KEY)
    save(found, path)
    measured = source.find(None, KEY, SMS)
    assert measured.calibration == found and measured.seed == 777
    path.unlink()
    shipped = source.find(None, KEY, SMS)
    assert shipped.calibration.source != "measured" and shipped.seed == 0
    unknown = source.find(None, replace(KEY, gpu="NVIDIA X1"), SMS)
    assert unknown.calibration.source == "conservative" and unknown.seed is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--heads", "32"], "heads must be like 32/8"),
        (["--heads", "64/8"], "it is for"),
        (["--calibration", "nowhere.json"], "nowhere.json"),
        (["--from", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_arguments(run, argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "python -m eval.policy_holdout" in capsys.readouterr().out


def test_the_host_times_are_of_256_requests(monkeypatch):
    steps = {"walk": 0.2, "steady": 0.01}
    monkeypatch.setattr(bench_plan, "measure", lambda batch, *_: steps if batch == 256 else None)
    found = calibration()
    times = host.policy_us(Predictor(found), planner_of(found), calls=3)
    assert times["walk"] == pytest.approx(200) and times["steady"] == pytest.approx(10)
    assert times["look"] > times["decide"] > 0


def test_the_report_has_a_table_of_it(run, tmp_path):
    _, result = run("--seeds", "101,102")
    table = report.markdown([("policy.json", result)])
    regret = result["summary"]["all"]["regret"]
    assert f"| regret, geometric mean | {regret:.4f} | " in table
    assert "20 batches of each of the seeds 101, 102" in table and "| groups | 10 |" in table


def test_the_plot_is_written(run, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    run("--seeds", "101", "--plot", str(out), meter=TrueMeter(failing=(3,)))
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert np.frombuffer(out.read_bytes(), np.uint8).size > 10_000
