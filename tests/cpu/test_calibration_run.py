"""Calibration from start to end with a made-up GPU: bandwidth, resumed measuring, honest fits."""

from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone
from functools import partial

import numpy as np
import pytest
import torch

from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import KernelRates, PortableRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.predict.codec import CalibrationError
from sgl_prefix_attn.predict.record import Origin
from sgl_prefix_attn.records import HeadConfig, PathTable
from sgl_prefix_attn.tools.calibrate import cuts, fit, measure, procedure, report, samples, timing
from sgl_prefix_attn.tools.calibrate.batches import Batch, draw
from sgl_prefix_attn.tools.calibrate.measure import BatchMeter
from sgl_prefix_attn.tools.calibrate.stock_decode import FlashAttention3Decode, FlashInferDecode
from tests.support.calibrations import (
    BANDWIDTH,
    HEADS,
    KEY,
    NUM_SMS,
    STOCK,
    TASK,
    FakeMeter,
    true_rates,
)
from tests.support.forests import path_table

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


@pytest.fixture(scope="module")
def measured(exact):
    return procedure.read_measured(exact)


@pytest.mark.parametrize("splits_nodes", [False, True])
def test_cuts_are_few_and_the_best_among_them(splits_nodes):
    rates = PortableRates() if splits_nodes else KernelRates()
    planner = Planner(
        HeadConfig(32, 8, 128), num_sms=NUM_SMS, rates=rates, splits_nodes=splits_nodes
    )
    split_off = 0
    for batch in draw(2, 20, 1 << 18):
        forest = build_forest(batch.paths)
        every, some = list(planner.cuts(forest)), cuts.chosen(planner, forest)
        assert len(some) <= 4 and some[0].us == min(cut.us for cut in every)
        assert len({cut.us for cut in some}) >= len(some) - 1
        split_off += any(cut.split_off for cut in some)
        again = cuts.predict(some, forest.unique_tokens, planner, rates)
        assert again.tolist() == [cut.us for cut in some], "a cut is predicted as it was"
    assert (split_off > 0) is splits_nodes


def cpu_meter(monkeypatch, page_size=1, family="hopper", dtype="float32", heads=HEADS, **options):
    """The real meter, on the CPU, and the planner of its plans."""
    made = []

    def new_backend(name, device, heads, dtype, kv_dtype):
        made.append(name)
        assert kv_dtype == getattr(torch, key.dtype)
        return TorchBackend(heads, dtype, device, 128)

    monkeypatch.setattr(measure, "new_backend", new_backend)
    key = replace(KEY, family=family, dtype=dtype, page_size=page_size, heads=heads)
    if heads.latent_dim:
        key = replace(key, fallback="fa3")
    device = torch.device("cpu")
    meter = BatchMeter(key, pool_tokens=2048, max_batch=128, device=device, **options)
    assert made == [family]
    return meter, Planner(heads, num_sms=meter.backend.num_sms, headroom=0)


class Attention:
    """A LayerTimer's part in measure(): plain attention, a little off where `wrong`."""

    def __init__(self, meter, kind, batch, slots, layers, wrong=0.0):
        k, v = layers[0]
        heads = meter.heads
        out = meter._new_out(meter._q[: batch.size])
        for row, length in enumerate(batch.paths.seq_lens.tolist()):
            keys, values = (
                x[slots[row, :length]].float().repeat_interleave(heads.group_size, 1)
                for x in (k, v)
            )
            scores = torch.einsum("hd,thd->ht", meter._q[row].float(), keys)
            scores *= heads.head_dim**-0.5
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(1), values)
        out[-1] *= 1 + wrong
        self.outs = [out]

    def replay(self):
        pass


PAIR = Batch("pair", path_table([(-1, 48), (0, 16)], [1, 1, 0, -1], [1, 40, 9, 70]))


@pytest.mark.parametrize(
    ("page_size", "dtype", "heads"),
    [
        (1, "float32", HEADS),
        (16, "float32", HEADS),
        (1, "float8_e4m3fn", HEADS),
        (16, "float32", HeadConfig(8, 1, 24, 16)),
    ],
)
def test_results_are_compared_and_times_not_swapped(page_size, dtype, heads, monkeypatch):
    meter, planner = cpu_meter(monkeypatch, page_size, dtype=dtype, heads=heads)
    forest = build_forest(PAIR.paths)
    plans = [planner.serialize(forest, cut) for cut in cuts.chosen(planner, forest)]
    assert len(plans) > 1
    monkeypatch.setattr(meter, "_stock_timer", partial(Attention, meter))
    monkeypatch.setattr(measure, "medians_us", lambda timers: list(range(len(timers))))
    assert meter.measure(PAIR, plans) == ([0], list(range(1, 1 + len(plans))))
    slots, _ = measure.slots_of(PAIR.paths, page_size, meter.device)
    shared = slots[:3, :48]
    assert (shared == shared[0]).all() and (slots[:2, :64] == slots[0, :64]).all()


@pytest.mark.parametrize("wrong", [0.0, 1e-3])
def test_fallbacks_are_timed_beside_each_other(wrong, monkeypatch):
    """Each by its own decode; the second is compared with the first, too."""
    meter, planner = cpu_meter(monkeypatch, fallbacks=("flashinfer", "fa3"))
    made = []

    def timer(kind, *args):
        made.append(kind)
        return Attention(meter, kind, *args, wrong=wrong * (kind is FlashAttention3Decode))

    monkeypatch.setattr(meter, "_stock_timer", timer)
    monkeypatch.setattr(measure, "medians_us", lambda timers: list(range(len(timers))))
    plans = [planner.plan(PAIR.paths)]
    if wrong:
        with pytest.raises(RuntimeError, match="row 3"):
            meter.measure(PAIR, plans)
    else:
        assert meter.measure(PAIR, plans) == ([0, 1], [2])
    assert made == [FlashInferDecode, FlashAttention3Decode]


@pytest.mark.parametrize(("kind", "pages"), [(FlashInferDecode, 1), (FlashAttention3Decode, 16)])
def test_a_decode_gets_pages_as_sglang_gives_them(kind, pages, monkeypatch):
    meter, _ = cpu_meter(monkeypatch, page_size=16)
    slots, num_slots = measure.slots_of(PAIR.paths, 16, meter.device)
    layers, ran = meter._layers(num_slots), []

    class Decode:
        page_size = kind.page_size

        def __init__(self, batch):
            self.page, self.table = batch.page_size, batch.pages

        def run(self, q, kv, out):
            assert kv[0].shape[1] == self.page == pages
            for row, length in enumerate(PAIR.paths.seq_lens.tolist()):
                keys = kv[0][self.table[row]].flatten(0, 1)[:length]
                torch.testing.assert_close(keys, layers[len(ran)][0][slots[row, :length]])
            ran.append(out)
            return out

    meter._stock_timer(Decode, PAIR, slots, layers).replay()
    assert len(ran) == len(layers)


@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_a_wrong_row_is_not_timed(wrong, monkeypatch):
    meter, planner = cpu_meter(monkeypatch)
    monkeypatch.setattr(meter, "_stock_timer", partial(Attention, meter, wrong=wrong))
    with pytest.raises(RuntimeError, match="differ on a batch of 4 requests .pair.: row 3"):
        meter.measure(PAIR, [planner.plan(PAIR.paths)])


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_bandwidth_is_of_kv_that_nobody_shares_without_what_a_step_costs(
    page_size, monkeypatch
):
    meter, planner = cpu_meter(monkeypatch, page_size)
    per_token = 2 * HEADS.num_kv_heads * HEADS.head_dim * 4

    def prefix_us(plan, paths):
        assert plan.stats.kv_tokens_unique in (0, 128 * 16)
        return 3.0 + plan.stats.kv_tokens_read * per_token / 2e6

    monkeypatch.setattr(meter, "prefix_us", prefix_us)
    assert meter.bandwidth(planner) == pytest.approx(2e6)
    monkeypatch.setattr(meter, "prefix_us", lambda plan, paths: 3.0)
    with pytest.raises(RuntimeError, match="times make no sense"):
        meter.bandwidth(planner)


def test_the_meter_times_a_plan_without_requests(monkeypatch):
    meter, planner = cpu_meter(monkeypatch)
    padding = planner.plan(PathTable.of([], [], [], []))
    assert meter.prefix_us(padding, PathTable.of([], [], [-1], [64])) > 0


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
    """None but the first runs right behind a kernel like its own."""
    monkeypatch.setitem(timing._REPLAYS, "cpu", 3)
    turns = []
    timers = [
        Timer("a", 2, (20.0, 900.0, 24.0, 26.0, 1.0, 25.0), turns),
        Timer("b", 4, (40.0, 44.0, 4.0), turns), Timer("c", 1, (7.0, 8.0, 9.0), turns),
    ]  # fmt: skip
    assert timing.medians_us(timers) == pytest.approx([12.5, 10.0, 8.0])
    assert turns == [*["warm a", "warm b", "warm c"] * 2, *["a", "b", "a", "c"] * 3]
    alone = Timer("d", 2, (20.0, 900.0, 24.0), turns)
    assert timing.medians_us([alone]) == [12.0]


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_an_implausible_bandwidth_is_refused_with_the_numbers(factor, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeMeter, "bandwidth", lambda self, planner: factor * 2.94e6)
    path = tmp_path / "s.jsonl"
    with pytest.raises(RuntimeError, match="measured bandwidth .* usual is 2.94e.06"):
        procedure.measure(TASK, path, FakeMeter, say=list)
    assert not path.exists()
    unknown = replace(TASK, key=replace(KEY, gpu="NVIDIA X1"), count=2)
    procedure.measure(unknown, path, lambda: FakeMeter(unknown.key), say=list)
    assert samples.read(path).header.bandwidth == factor * 2.94e6


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
    procedure.measure(replace(TASK, count=0), tmp_path / "s.jsonl", FakeMeter, say=list)
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
        (b"[0,3,70,0,[]]", "no sample: .*> 0"),
        (b'[0,3,70,"1",[]]', "no sample: .*float"),
        (b"[0,3,70,1.5,[[2.0]]]", "no sample: .*length 2"),
        (b"[0,3,70,1.5,[[2.0,-1.0]]]", "no sample: .*> 0"),
        (b"[-1,3,70,1.5,[]]", "no sample: .*>= 0"),
    ],
)
def test_a_spoilt_line_before_the_last_is_refused(line, reason, exact, tmp_path):
    lines = exact.read_bytes().splitlines()
    lines[3] = line
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(CalibrationError, match=reason) as error:
        procedure.read_measured(path)
    assert str(path) in str(error.value)


def test_samples_of_batches_that_are_drawn_otherwise_today_are_refused(exact, tmp_path):
    lines = exact.read_bytes().splitlines()
    lines[1], lines[2] = lines[1].replace(b"[0,", b"[1,"), lines[2].replace(b"[1,", b"[0,")
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(CalibrationError, match="measure with --fresh"):
        procedure.read_measured(path)
    with pytest.raises(CalibrationError, match="measure with --fresh"):
        procedure.measure(LARGE, path, FakeMeter, say=list)


def test_samples_of_other_cuts_than_those_of_today_are_refused(exact, tmp_path):
    first, *rows = exact.read_bytes().splitlines()
    for row in (rows[0].replace(b"[[", b"[[9", 1), rows[0].replace(b"[[", b"[[1.5,1.5],[", 1)):
        path = tmp_path / "s.jsonl"
        path.write_bytes(b"\n".join([first, row, *rows[1:]]) + b"\n")
        with pytest.raises(CalibrationError, match="batch 0 had other cuts .* --fresh"):
            procedure.read_measured(path)


def test_too_few_samples_are_refused(exact, tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"\n".join(exact.read_bytes().splitlines()[:30]) + b"\n")
    with pytest.raises(CalibrationError, match="29 samples, a fit needs 40"):
        procedure.read_measured(path)


@pytest.mark.slow
def test_the_fits_recover_what_the_times_were_made_with(measured):
    got = procedure.finish(measured, procedure.HeldOut(measured.stock_us, measured.cut_us))
    assert tuple(got.stock.values()) == pytest.approx(STOCK, rel=0.02)
    start, truth = measured.header.start, true_rates(procedure.planner_of(measured.header).rates)
    for name in ("hbm", "fixed", "item"):
        assert got.rates[name] == pytest.approx(vars(truth)[name], rel=0.1) != start[name]


def test_a_rate_that_no_cut_tells_stays_where_it_was(measured):
    planner = procedure.planner_of(measured.header)
    whole = [i for i, found in enumerate(measured.cuts) if all(c.parts.max() == 1 for c in found)]
    assert len(whole) > 10
    rates = procedure.fit_rates(measured, planner, whole)
    assert (rates.split, rates.part) == pytest.approx((planner.rates.split, planner.rates.part))
    assert rates.fixed != pytest.approx(planner.rates.fixed, rel=0.1)


def test_rates_keep_their_kind():
    found = fit.fit_rates(lambda rates: np.array([rates.fixed]), np.array([8.0]), PortableRates())
    assert type(found) is PortableRates
    assert PortableRates().fixed < found.fixed < 8.0


@pytest.mark.long
def test_a_calibration_from_a_samples_file_needs_no_gpu(exact):
    measured = procedure.read_measured(exact)
    got = procedure.finish(measured, procedure.hold_out(measured))
    assert (got.key, got.num_sms, got.samples, got.source) == (KEY, NUM_SMS, 240, "measured")
    assert got.versions == TASK.versions
    assert got.origin == Origin(TASK.seed, 240, TASK.pool_tokens, DAY)
    assert got.bandwidth == samples.read(exact).header.bandwidth == BANDWIDTH
    assert got.errors["stock"] < 0.005 and got.errors["prefix"] < 0.02


@pytest.mark.long
def test_the_error_on_unseen_batches_is_about_the_noise(tmp_path):
    path, noise = tmp_path / "s.jsonl", 0.08
    procedure.measure(replace(LARGE, count=120), path, partial(FakeMeter, noise=noise), say=list)
    measured = procedure.read_measured(path)
    held_out = procedure.hold_out(measured)
    got = procedure.finish(measured, held_out)
    for error in got.errors.values():
        assert noise * 0.8 < error < noise * 1.4
    # Not the error on batches that the fit has seen, which is smaller.
    costs = measured.header.kv_costs
    fitted = [procedure.stock_physical(got.stock.values(), w, costs) for w in measured.works]
    assert fit.log_rms(np.array(fitted), measured.stock_us) < got.errors["stock"]
    assert got.errors["stock"] == fit.log_rms(held_out.stock_us, measured.stock_us)


def test_a_fallback_that_the_formula_does_not_describe_is_not_written(measured):
    """Its time is anything, whatever its work is."""
    any_time = np.random.default_rng(0).permutation(measured.stock_us)
    fitted = procedure.fit_stock(replace(measured, stock_us=any_time), list(range(any_time.size)))
    costs = measured.header.kv_costs
    us = [procedure.stock_physical(fitted.values(), work, costs) for work in measured.works]
    held_out = procedure.HeldOut(np.array(us), measured.cut_us)
    with pytest.raises(CalibrationError, match="flashinfer: the formula of its times does not fit"):
        procedure.finish(measured, held_out)


def test_each_batch_is_predicted_by_a_fit_without_it():
    seen = []

    def train(part):
        seen.append(set(part))
        return set(part)

    def predict(model, i):
        assert i not in model
        return 10 * i

    assert fit.cross_validate(train, predict, 23) == [10 * i for i in range(23)]
    assert len(seen) == 5 and all(len(part) in (18, 19) for part in seen)


def test_the_report_says_what_the_policy_makes_of_it(measured):
    perfect = procedure.HeldOut(measured.stock_us, measured.cut_us)
    fastest = np.array([us.min() for us in measured.cut_us])
    better = (fastest < measured.stock_us).sum()
    stock, prefix, cut, counts, ratios = report.lines(measured, perfect)
    assert stock == "stock: predictions err by 0.0%, at worst 0%"
    assert prefix.startswith(f"prefix, {sum(map(len, measured.cuts))} cuts: ")
    assert "fastest cut measured: 1.0000 on average, 1.000 at worst" in cut
    assert f"faster in {better}" in counts and "policy 1.0" in ratios
    assert report.policy_choice(measured, perfect).sum() <= better
    # each kernel takes what the other one is said to take, and the slowest cut looks fastest
    wrong = procedure.HeldOut(
        fastest,
        [
            stock / us
            for stock, us in zip(measured.stock_us * fastest, measured.cut_us, strict=True)
        ],
    )
    worse = report.lines(measured, wrong)
    assert float(worse[2].split("measured: ")[1].split()[0]) > 1.05
    assert float(worse[4].split("policy ")[1].split()[0]) > 1.05
