"""eval.row_tile_fit: samples by the torch interpreter, fits to times that are made up."""

from dataclasses import replace

import numpy as np
import orjson
import pytest
import torch

from eval.bench_kernel.trees import parse_trees
from eval.row_tile_fit import __main__ as command
from eval.row_tile_fit import fitting, measure, picks, samples
from eval.row_tile_fit.samples import Sample
from sgl_prefix_attn.calibrate.batches import Batch, draw
from sgl_prefix_attn.execute.backends import gluon_backend
from sgl_prefix_attn.execute.backends.torch_row_tiles import TorchRowTiles
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tile_time import RowTileRates
from sgl_prefix_attn.predict.row_tile_rates import rates_of_gpu
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import random_paths

# Of samples and their times, whatever rates are shipped.
CHOSEN_BY = RowTileRates(
    wide=0.931, narrow=0.652, wide_masked=0.596, narrow_masked=0.601, item=1.875, hbm=3.462e6,
    l2=13.2e6, fixed=5.43, split=0.294, part=0.079, partial=1.32e6, overlap=1.739,
)  # fmt: skip
TRUE = replace(CHOSEN_BY, wide=1.4, item=3.0, hbm=5e6, fixed=8.0)
HEADS = (HeadConfig(32, 8, 128), HeadConfig(28, 4, 128), HeadConfig(8, 1, 128))


def made_up(count=25, noise=0.0):
    """Samples that take what TRUE says, times up to 1 + noise."""
    rng = np.random.default_rng(0)
    found = []
    for heads in HEADS:
        planner = RowTilePlanner(heads, num_sms=132, rates=CHOSEN_BY, headroom=0)
        for i, batch in enumerate(draw(1, count, 1 << 18)):
            forest = build_forest(batch.paths)
            for cut in measure.chosen(list(planner.cuts(forest))):
                one = Sample.of("GPU", 132, heads, f"1:{i}", forest.unique_tokens, cut, 1.0)
                us = one.predicted_us(TRUE) * (1 + noise * rng.random())
                found.append(replace(one, us=us))
    return found


@pytest.fixture(scope="module")
def found():
    return made_up()


def test_a_sample_is_predicted_as_its_cut_is():
    heads = HEADS[1]
    planner = RowTilePlanner(heads, num_sms=132, headroom=0)
    forest = build_forest(draw(3, 4, 1 << 18)[3].paths)
    for cut in planner.cuts(forest):
        one = Sample.of("GPU", 132, heads, "", forest.unique_tokens, cut, 1.0)
        assert one.predicted_us(planner.rates) == cut.us


def test_a_search_that_ends_early_is_told_by_measured_times(found, monkeypatch):
    for one in picks.picks(found, TRUE):
        assert one.timed >= 0.9 * one.batches == 0.9 * 25 and one.worst <= 1.02
    first = RowTilePlanner.promising
    monkeypatch.setattr(RowTilePlanner, "promising", lambda *args: first(*args)[:1])
    assert picks.picks(found, TRUE)[2].mean > 1.1, "of one KV head few tiles may stay whole"
    with pytest.raises(ValueError, match="batch 1:3 is drawn otherwise"):
        picks.picks([replace(found[0], batch="1:3")], TRUE)


def test_picks_are_printed(found, tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    samples.write(path, found[:20])
    assert command.main(["picks", "--jsonl", str(path)]) == 0
    assert "32/8   picked over fastest" in capsys.readouterr().out


def test_trees_are_predicted_as_their_plans_are(tmp_path, capsys):
    row = {"tree": "1,8_1024,256", "heads": "8/1", "head_dim": 128, "status": "ok"}
    planner = RowTilePlanner(HEADS[2], num_sms=132, rates=rates_of_gpu("NVIDIA H200", 0.0, 128))
    us = planner.plan_forest(build_forest(parse_trees(row["tree"])[0].paths())).predicted_us
    rows = [
        row | {"provider": "prefix", "us": us / 1.1},
        row | {"provider": "prefix", "us": us * 1.1},
        row | {"provider": "fa3", "us": 1.0},
        row | {"provider": "prefix", "status": "unsupported"},
    ]
    path = tmp_path / "kernels.json"

    def said(gpu, *more):
        path.write_bytes(orjson.dumps({"meta": {"gpu": gpu, "command": ""}, "rows": rows}))
        assert command.main(["trees", str(path), *more]) == 0
        return capsys.readouterr().out

    assert "2 trees: 1.000, rms of logarithms 0.095" in said("NVIDIA H200")
    for gpu, more, message in (
        ("NVIDIA X1", (), "measured on NVIDIA X1"),
        ("NVIDIA H200", ("--provider", "prefix:row_tiles"), "prefix:row_tiles ran nothing"),
    ):
        with pytest.raises(SystemExit):
            said(gpu, *more)
        assert message in capsys.readouterr().err


def test_a_fit_finds_rates_that_explain_the_times(found):
    rates = fitting.fit(found)
    today = fitting.judge("all", found, RowTileRates())
    judged = fitting.judge("all", found, rates)
    assert judged.error < 0.01 < 0.1 < today.error
    assert rates.fixed == pytest.approx(TRUE.fixed, rel=0.2)
    for one in fitting.leave_one_out(found, rates):
        assert one.error < 0.03 and one.regret < 1.005


def test_a_single_head_configuration_is_judged_by_fifths_of_its_batches(found):
    mine = [sample for sample in found if sample.heads == "28/4"]
    parts = fitting.parts(mine)
    assert sum(map(len, parts.values())) == len(mine) and len(parts) == 5
    batches = [{sample.batch for sample in part} for part in parts.values()]
    assert sum(map(len, batches)) == len(set().union(*batches)), "no batch is in two parts"
    for one in fitting.leave_one_out(mine, TRUE):
        assert one.heads.startswith("28/4, fifth") and one.error < 0.03


def test_a_rate_that_no_sample_tells_stays_where_it_was(found):
    whole = [sample for sample in found if max(sample.parts) == 1]
    rates = fitting.fit(whole, TRUE)
    assert (rates.split, rates.part) == pytest.approx((TRUE.split, TRUE.part), rel=0.01)


def test_times_without_rhyme_are_found_out(found):
    order = np.random.default_rng(0).permutation(len(found))
    shuffled = [replace(one, us=found[i].us) for one, i in zip(found, order, strict=True)]
    assert fitting.judge("all", shuffled, TRUE).regret > 1.2


def test_regret_is_of_the_cut_that_is_chosen():
    one, other = made_up(count=1)[:2]
    one = replace(one, us=5.0)
    other = replace(one, us=4.0, parts=[part + 40 for part in one.parts])  # said to be slower
    judged = fitting.judge("x", [one, other], TRUE)
    assert judged.regret == judged.worst == pytest.approx(1.25)
    with pytest.raises(ValueError, match="no batch has several"):
        fitting.judge("x", [one], TRUE)


def test_cuts_are_few_and_the_best_among_them():
    planner = RowTilePlanner(HEADS[0], num_sms=132)
    for batch in draw(2, 20, 1 << 18):
        cuts = list(planner.cuts(build_forest(batch.paths)))
        some = measure.chosen(cuts)
        assert len(some) <= 4 and some[0].us == min(cut.us for cut in cuts)
        assert len({id(cut) for cut in some}) == len(some)


def test_samples_of_every_head_configuration(monkeypatch, tmp_path, capsys):
    """The command on the CPU: the interpreter stands for the kernels, batches are tiny."""
    monkeypatch.setattr(gluon_backend, "GluonBackend", TorchRowTiles)
    monkeypatch.setattr(measure, "compile_all", lambda heads, gpu: None)
    monkeypatch.setattr(measure, "POOL_TOKENS", 4096)
    monkeypatch.setattr(measure, "_COLD_BYTES", 0)
    tiny = [Batch("tiny", random_paths(seed, 5, 3)) for seed in range(2)]
    monkeypatch.setattr(command, "draw", lambda *args: tiny)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(command, "gpu", lambda: torch.device("cpu"))
    file = tmp_path / "samples.jsonl"
    argv = ["sample", "--heads", "4/2,3/1", "--head-dim", "64", "--seconds", "100"]
    argv += ["--jsonl", str(file)]
    assert command.main(argv) == 0
    found = samples.read(file)
    assert {(one.heads, one.head_dim) for one in found} == {("4/2", 64), ("3/1", 64)}
    assert all(one.us > 0 for one in found)
    assert {one.batch for one in found} == {"201:0", "201:1"}
    assert capsys.readouterr().out.count("of 2 batches") == 2


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.jsonl.xz"])
def test_the_fit_is_a_result_file(name, found, tmp_path, capsys):
    file, out = tmp_path / name, tmp_path / "fit.json"
    samples.write(file, found[::2])
    samples.write(file, found[1::2])
    assert sorted(samples.read(file), key=str) == sorted(found, key=str)
    assert command.main(["fit", "--jsonl", str(file), "--json", str(out)]) == 0
    result = orjson.loads(out.read_bytes())
    assert {row["heads"] for row in result["rows"]} == {"32/8", "28/4", "8/1"}
    assert RowTileRates(**result["rates"]).fixed == pytest.approx(TRUE.fixed, rel=0.2)
    assert "enough is 1.02" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no sample in it"),
        ("{", "line 1"),
        ('{"gpu": "x"}', "line 1"),
        (None, "No such file"),
        ("not compressed", "samples.xz: "),
    ],
)
def test_a_file_that_is_none_is_named(text, says, tmp_path, capsys):
    file = tmp_path / ("samples.xz" if says.startswith("samples") else "samples.jsonl")
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        command.main(["fit", "--jsonl", str(file)])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpu": "another"}, "several GPUs, GPU, another"),
        ({"head_dim": 256}, "several head dims, [128, 256]"),
    ],
)
def test_samples_that_no_rates_describe_together_are_refused(change, says, found, tmp_path, capsys):
    file = tmp_path / "samples.jsonl"
    samples.write(file, [found[0], replace(found[1], **change)])
    with pytest.raises(SystemExit):
        command.main(["fit", "--jsonl", str(file)])
    assert says in capsys.readouterr().err


def test_samples_need_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["sample", "--jsonl", str(tmp_path / "samples.jsonl")])
    assert "sees no CUDA GPU here" in capsys.readouterr().err
