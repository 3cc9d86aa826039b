"""eval.other_heads: calibrations of made-up samples, judged on those of other heads."""

from dataclasses import replace

import orjson
import pytest

from eval import other_heads
from sgl_prefix_attn.calibrate import procedure
from sgl_prefix_attn.records import HeadConfig
from tests.support.calibrations import KEY, TASK, FakeMeter


class Noisy(FakeMeter):
    def __init__(self, planner, max_batch):
        super().__init__(planner, max_batch, noise=0.02)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Samples of two head configurations, whose times the models describe alike."""
    folder, made = tmp_path_factory.mktemp("samples"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procedure, "_measure_rates", lambda task, new_meter: usual(task))
        for heads in (HeadConfig(32, 8, 128), HeadConfig(16, 4, 128)):
            made.append(folder / f"{heads.num_kv_heads}.jsonl")
            task = replace(TASK, key=replace(KEY, heads=heads))
            procedure.measure(task, made[-1], Noisy, say=lambda text: None)
    return made


def usual(task):
    return procedure.usual_rates(task.key.gpu)


def test_each_calibration_is_judged_on_every_samples_file(files, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert other_heads.main([*map(str, files), "--json", str(out)]) == 0
    rows = orjson.loads(out.read_bytes())["rows"]
    pairs = [(row["of"], row["for"]) for row in rows]
    assert pairs == [(a, b) for a in ("32/8", "16/4") for b in ("32/8", "16/4")]
    for row in rows:
        assert row["batches"] == TASK.count and row["stock error"] < 0.05
        assert row["stock bias"] == pytest.approx(1, abs=0.03)
        assert 1 <= row["regret"] <= row["worst"]
    assert "16/4 for 32/8" in capsys.readouterr().out


def test_a_term_that_forgets_the_heads_is_found_out(files, monkeypatch, tmp_path):
    """Pieces of a request counted, whatever its KV heads, as before."""
    exact = other_heads.STOCK_MODEL

    def per_request(c, work, costs):
        c = list(c)
        c[2] *= 40 / costs.num_kv_heads
        return exact.formula(c, work, costs)

    monkeypatch.setattr(other_heads, "STOCK_MODEL", replace(exact, formula=per_request))
    out = tmp_path / "out.json"
    other_heads.main([*map(str, files), "--json", str(out)])
    rows = orjson.loads(out.read_bytes())["rows"]
    carried = [row["stock error"] for row in rows if row["of"] != row["for"]]
    own = [row["stock error"] for row in rows if row["of"] == row["for"]]
    assert max(own) < 0.05 < 1.5 * 0.05 < max(carried)


@pytest.mark.parametrize("which", [[0, 0], [0, "none"]])
def test_unusable_files_are_refused(which, files, tmp_path, capsys):
    given = [str(tmp_path / i if i == "none" else files[i]) for i in which]
    with pytest.raises(SystemExit):
        other_heads.main(given)
    assert ("of different heads" if which == [0, 0] else "none") in capsys.readouterr().err
