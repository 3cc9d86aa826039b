"""Calibration from start to end with a made-up GPU: rates, resumed measuring, an honest fit."""

from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone
from functools import partial

import numpy as np
import pytest
import torch

from sgl_prefix_attn.calibrate import fit, measure, procedure, report, samples, timing
from sgl_prefix_attn.calibrate.batches import Batch, path_table
from sgl_prefix_attn.calibrate.measure import BatchMeter
from sgl_prefix_attn.calibrate.rates import (
    MAX_QUERIES,
    check_plausible,
    full_waves,
    measure_rates,
    min_pool,
    nested,
    unshared,
)
from sgl_prefix_attn.engine.build import padding_plan
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.plan import CostModel, Planner
from sgl_prefix_attn.plan.costs import GPU_RATES
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.tile_defaults import default_tile_set, gpu_tile_set
from sgl_prefix_attn.predict.codec import CalibrationError
from sgl_prefix_attn.predict.record import Origin
from sgl_prefix_attn.records import HeadConfig
from tests.support.calibrations import HEADS, KEY, NUM_SMS, PREFIX, STOCK, TASK, FakeMeter

LARGE = replace(TASK, count=240)
DAY = date(2026, 2, 28)


@pytest.fixture(autouse=True)
def fresh_counter(monkeypatch):
    monkeypatch.setattr(FakeMeter, "measured", 0)
    monkeypatch.setattr(FakeMeter, "broken_at", None)


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Samples without noise."""
    path = tmp_path_factory.mktemp("samples") / "exact.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "today", lambda: DAY)
        procedure.measure(LARGE, path, FakeMeter, say=list)
    return path


@pytest.mark.parametrize("heads", [(32, 8), (16, 4), (64, 8), (28, 4), (32, 32), (8, 1)])
def test_arithmetic_is_timed_with_every_cta_busy(heads):
    heads, ctas = HeadConfig(*heads, 128), 3 * NUM_SMS
    planner = Planner(heads, tile_set=gpu_tile_set(NUM_SMS, heads), strategy="naive")
    queries = full_waves(planner, ctas)
    assert MAX_QUERIES // 2 < queries <= MAX_QUERIES
    items = planner.plan(nested((queries,), 16384, queries)).work.shared_items * heads.num_kv_heads
    assert 0.95 * ctas * -(-items // ctas) <= items


def test_rates_are_what_the_gpu_does():
    for heads in (HEADS, HeadConfig(32, 8, 128), HeadConfig(8, 1, 128), HeadConfig(16, 16, 64)):
        for page_size in (1, 16, 128):
            tiles, known = gpu_tile_set(NUM_SMS, heads), GPU_RATES["H100"]
            planner = Planner(heads, tile_set=tiles, strategy="naive")
            pool = min_pool(page_size)
            capacity = Capacity.for_server(MAX_QUERIES, pool, planner.headroom, tiles, heads)

            class Meter(FakeMeter):
                def prefix_us(self, plan, paths):
                    assert capacity.covers(plan), plan.stats  # noqa: B023
                    assert plan.batch_size in (0, paths.seq_lens.size)
                    return super().prefix_us(plan, paths)

            meter = Meter(planner, MAX_QUERIES)
            got = measure_rates(meter, planner, 2, pool, page_size)
            assert (got.launch, got.ctas) == (known.launch, known.ctas)
            for name in ("bandwidth", "mma", "item"):
                assert getattr(got, name) == pytest.approx(getattr(known, name), rel=0.1), name


PACKS = Planner(HEADS, tile_set=default_tile_set("cpu", HEADS), strategy="naive")
ROW_TILES = RowTilePlanner(HEADS, num_sms=4)


def cpu_meter(page_size=1, planner=PACKS):
    """The real meter, on the CPU."""
    return BatchMeter(
        planner,
        dtype=torch.float32,
        page_size=page_size,
        pool_tokens=2048,
        max_batch=16,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("planner", [PACKS, ROW_TILES], ids=["packs", "row_tiles"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_meter_runs_any_plan_over_the_kv_of_any_paths(page_size, planner):
    """The padding plan, and a plan whose result is looked at."""
    meter = cpu_meter(page_size, planner)
    assert meter.prefix_us(padding_plan(planner), unshared(1, 64)) > 0
    paths = path_table([(-1, 48), (0, 16)], [1, 1, 0, -1], [64, 64, 48, 0], [1, 40, 9, 70])
    assert meter.prefix_us(planner.plan(paths), paths) > 0
    slots, num_slots = measure.slots_of(paths, page_size, meter.device)
    (k, v), *_ = layers = meter._layers(num_slots)
    timer = meter._prefix_timer(planner.plan(paths), paths, slots, layers)
    timer.replay()
    for row, length in enumerate(paths.seq_lens.tolist()):
        keys, values = (
            x[slots[row, :length]].repeat_interleave(HEADS.group_size, 1) for x in (k, v)
        )
        scores = torch.einsum("hd,thd->ht", meter._q[row], keys) * HEADS.head_dim**-0.5
        wanted = torch.einsum("ht,thd->hd", scores.softmax(1), values)
        torch.testing.assert_close(timer.outs[0][row], wanted, rtol=1e-3, atol=1e-4)
    shared = slots[:3, :48]
    assert (shared == shared[0]).all() and (slots[:2, :64] == slots[0, :64]).all()


def test_a_measurement_does_not_swap_its_times(monkeypatch):
    meter = cpu_meter()
    batch = Batch("pair", path_table([(-1, 32)], [0, 0], [32, 32], [5, 9]))
    made = []

    def stock_timer(batch, slots, layers):
        plan = meter.planner.plan(batch.paths)
        made.append(meter._prefix_timer(plan, batch.paths, slots, layers))
        return made[0]

    def medians_us(timers):
        return [1.0 if timer is made[0] else 2.0 for timer in timers]

    monkeypatch.setattr(meter, "_stock_timer", stock_timer)
    monkeypatch.setattr(measure, "medians_us", medians_us)
    assert meter.measure(batch) == (1.0, 2.0)


class Timer:
    """A LayerTimer whose replays take given times; `turns` is shared by several of them."""

    device_type = "cpu"

    def __init__(self, name, layers, times, turns):
        self.name, self.layers, self.times, self.turns = name, layers, list(times), turns

    def replay(self):
        self.turns.append(f"warm {self.name}")

    def replay_us(self):
        self.turns.append(self.name)
        return self.times.pop(0)


def test_timers_take_turns_and_keep_their_order(monkeypatch):
    monkeypatch.setitem(timing._REPLAYS, "cpu", 3)
    turns = []
    timers = [Timer("a", 2, (20.0, 900.0, 24.0), turns), Timer("b", 4, (40.0, 44.0, 4.0), turns)]
    assert timing.medians_us(timers) == pytest.approx([12.0, 10.0])
    assert turns == [*["warm a", "warm b"] * 2, *["a", "b"] * 3]


def test_rates_of_a_disturbed_gpu_are_refused():
    planner = Planner(HEADS, tile_set=gpu_tile_set(NUM_SMS, HEADS), strategy="naive")
    steady, slow = FakeMeter(planner, MAX_QUERIES), FakeMeter(planner, MAX_QUERIES)
    usual = steady.prefix_us
    # Each time is the same; unshared requests take longer than items of shared KV explain.
    steady.prefix_us = lambda plan, paths: 10.0
    slow.prefix_us = lambda plan, paths: usual(plan, paths) + 1e4 * (plan.batch_size == 128)
    for meter, name in ((steady, "bandwidth"), (slow, "item")):
        with pytest.raises(RuntimeError, match=f"make no sense: {name}"):
            measure_rates(meter, planner, 2, 1 << 17, 1)


@pytest.mark.parametrize("name", ["bandwidth", "mma", "item", "launch"])
@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_implausible_rates_are_refused_with_the_numbers(name, factor):
    known = GPU_RATES["H100"]
    check_plausible(known, KEY.gpu)
    bad = replace(known, **{name: getattr(known, name) * factor})
    with pytest.raises(RuntimeError, match=f"measured {name} .* usual is"):
        check_plausible(bad, KEY.gpu)
    check_plausible(bad, "NVIDIA X1")  # nothing is known about it


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    path, done = tmp_path / "new" / "s.jsonl", []
    monkeypatch.setattr(samples, "today", lambda: DAY)
    monkeypatch.setattr(FakeMeter, "broken_at", 25)
    with pytest.raises(RuntimeError, match="differ"):
        procedure.measure(TASK, path, FakeMeter, say=list)
    assert len(samples.read(path).rows) == 25
    with path.open("ab") as file:  # a crash in the middle of a line
        file.write(b"[25,3,77")
    monkeypatch.setattr(FakeMeter, "broken_at", None)
    monkeypatch.setattr(samples, "today", lambda: DAY + timedelta(days=1))
    said = []
    procedure.measure(TASK, path, FakeMeter, say=said.append, progress=done.append)
    assert samples.read(path).header.date == DAY, "measuring began then"
    monkeypatch.setattr(samples, "today", lambda: DAY)
    assert FakeMeter.measured == TASK.count
    assert done == list(range(1, TASK.count + 1))
    assert "25 of 60 batches are in" in said[0]
    whole = tmp_path / "whole.jsonl"
    procedure.measure(TASK, whole, FakeMeter, say=list)
    assert path.read_bytes() == whole.read_bytes()


def test_a_finished_run_measures_nothing_again(exact):
    procedure.measure(LARGE, exact, lambda *args: pytest.fail("no meter is needed"), say=list)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"count": 61},
        {"pool_tokens": 150_000},
        {"num_sms": 114},
        {"versions": {"torch": "2"}},
        {"key": replace(KEY, page_size=16)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_header_starts_afresh(change, tmp_path):
    path, said = tmp_path / "s.jsonl", []
    procedure.measure(TASK, path, FakeMeter, say=list)
    FakeMeter.measured = 0
    other = replace(TASK, **change)
    procedure.measure(other, path, FakeMeter, say=said.append)
    assert FakeMeter.measured == other.count and samples.read(path).header.task == other
    assert said[0].startswith(f"starting afresh: {path} holds samples of")


def test_samples_are_dated_in_utc(tmp_path):
    samples.start(tmp_path / "s.jsonl", TASK, GPU_RATES["H100"])
    began = samples.read(tmp_path / "s.jsonl").header.date
    age = datetime.now(timezone.utc) - datetime.combine(began, time(), timezone.utc)
    assert timedelta(0) <= age < timedelta(days=1, minutes=1)


@pytest.mark.parametrize("content", [b"", b"{}\n", b"torn header", b"\x00\n"])
def test_no_samples_file_starts_afresh(content, tmp_path):
    path, said = tmp_path / "s.jsonl", []
    path.write_bytes(content)
    procedure.measure(TASK, path, FakeMeter, say=said.append)
    assert said[0].startswith(f"starting afresh: {path}: ")
    assert len(samples.read(path).rows) == TASK.count


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{}", "no sample: .*array"),
        (b"[0,1", "no sample: .*truncated"),
        (b"[0,3,70,1.5]", "no sample: .*length 5"),
        (b"[0,3,70,1.5,0]", "no sample: .*> 0"),
        (b'[0,3,70,"1",2.0]', "no sample: .*float"),
        (b"[-1,3,70,1.5,2.0]", "no sample: .*>= 0"),
    ],
)
def test_a_spoilt_line_before_the_last_is_refused(line, reason, exact, tmp_path):
    lines = exact.read_bytes().splitlines()
    lines[3] = line
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(CalibrationError, match=reason) as error:
        procedure.fit_samples(path)
    assert str(path) in str(error.value)


def test_samples_of_batches_that_are_drawn_otherwise_today_are_refused(exact, tmp_path):
    lines = exact.read_bytes().splitlines()
    lines[1], lines[2] = lines[1].replace(b"[0,", b"[1,"), lines[2].replace(b"[1,", b"[0,")
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(CalibrationError, match="measure with --fresh"):
        procedure.fit_samples(path)
    with pytest.raises(CalibrationError, match="measure with --fresh"):
        procedure.measure(LARGE, path, FakeMeter, say=list)


def test_too_few_samples_are_refused(exact, tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\n".join(exact.read_bytes().splitlines()[:30]) + b"\n")
    with pytest.raises(CalibrationError, match="29 samples, a fit needs 40"):
        procedure.fit_samples(path)


def test_the_fit_recovers_what_the_times_were_made_with(exact):
    measured = procedure.read_measured(exact)
    got = procedure.finish(measured, procedure.HeldOut(measured.stock_us, measured.prefix_us))
    assert tuple(got.stock.values()) == pytest.approx(STOCK, rel=0.02)
    assert tuple(got.prefix.values()) == pytest.approx(PREFIX, rel=0.02)


def test_a_calibration_from_a_samples_file_needs_no_gpu(exact):
    got = procedure.fit_samples(exact)
    assert (got.key, got.num_sms, got.samples, got.source) == (KEY, NUM_SMS, 240, "measured")
    assert got.versions == TASK.versions
    assert got.origin == Origin(TASK.seed, 240, TASK.pool_tokens, DAY)
    assert got.rates == samples.read(exact).header.rates
    assert max(got.errors.values()) < 0.005
    assert got.costs == CostModel.from_rates(got.rates, HEADS)


def test_the_error_on_unseen_batches_is_about_the_noise(tmp_path):
    path, noise = tmp_path / "s.jsonl", 0.08
    procedure.measure(LARGE, path, partial(FakeMeter, noise=noise), say=list)
    measured = procedure.read_measured(path)
    held_out = procedure.hold_out(measured)
    got = procedure.finish(measured, held_out)
    for error in got.errors.values():
        assert noise * 0.85 < error < noise * 1.4
    # Not the error on batches that the fit has seen, which is smaller.
    fitted = fit.STOCK_MODEL.predict(got.stock, measured.stock_works, measured.costs)
    assert fit.log_rms(fitted, measured.stock_us) < got.errors["stock"]
    assert got.errors["stock"] == fit.log_rms(held_out.stock_us, measured.stock_us)


def test_each_batch_is_predicted_by_a_fit_without_it():
    works, seen = list(range(23)), []

    class Mean:
        def fit(self, part, us, costs):
            assert us.tolist() == [10.0 * work for work in part]
            seen.append(set(part))
            return set(part)

        def predict(self, fitted, part, costs):
            assert fitted.isdisjoint(part)
            return np.array(part, float)

    predicted = fit.cross_validate(Mean(), works, np.arange(23) * 10.0, None)
    assert predicted.tolist() == works
    assert len(seen) == 5 and all(len(part) in (18, 19) for part in seen)


def test_the_report_says_what_the_policy_makes_of_it(exact):
    measured = procedure.read_measured(exact)
    perfect = procedure.HeldOut(measured.stock_us, measured.prefix_us)
    wrong = procedure.HeldOut(measured.prefix_us, measured.stock_us)
    better = (measured.prefix_us < measured.stock_us).sum()
    first, _, counts, ratios = report.lines(measured, perfect)
    assert first == "stock: predictions err by 0.0%, at worst 0%"
    assert f"faster in {better}" in counts and "policy 1.0" in ratios
    assert report.policy_choice(measured, perfect).sum() <= better
    worst = report.lines(measured, wrong)[3]
    assert float(worst.split("policy ")[1].split()[0]) > 1.05
