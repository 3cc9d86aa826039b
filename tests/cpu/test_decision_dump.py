"""Decisions of a running server, written for explain: how many, and what they hold."""

import logging

import orjson
import pytest

from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.records import Decision, PathTable, Prediction
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.step import decision_dump
from sgl_prefix_attn.tools import plan_spec
from tests.support.steps import Times, preparer, run, shared_world


def deciding(folder, every, batches, **shared):
    """Steps of a server, each of them about another batch."""
    world = shared_world()
    settings = Settings(dump=str(folder), dump_every=every)
    steps = preparer(settings, predictor=Times(3.0, 2.0), **shared)
    for i in range(batches):
        world.add([0] * 40 + [100 + i], tail=20)
        assert run(steps, world, 1).is_prefix
    return steps


@pytest.mark.parametrize(("every", "files"), [(1, 7), (3, 3), (100, 1)])
def test_every_nth_decision_is_written(tmp_path, every, files):
    deciding(tmp_path / "new", every, 7)
    written = sorted((tmp_path / "new").iterdir())
    assert len(written) == files
    sizes = [len(orjson.loads(file.read_bytes())["seq_lens"]) for file in written]
    assert sizes == [5 + every * i for i in range(files)]


def test_files_are_bounded_and_the_newest_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(decision_dump, "MOST_FILES", 3)
    deciding(tmp_path, 1, 7)
    sizes = [len(orjson.loads(file.read_bytes())["seq_lens"]) for file in tmp_path.iterdir()]
    assert sorted(sizes) == [9, 10, 11]


def test_nothing_is_written_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deciding("", 1, 2)
    assert not list(tmp_path.iterdir())


def test_a_file_is_what_explain_reads(tmp_path):
    paths = PathTable.of([-1, 0, 0, 1], [64, 0, 7, 5], [3, 2, 2, -1], [90, 80, 75, 9])
    decision = Decision("prefix", "predicted_faster", Prediction(3.0, 2.0))
    file = tmp_path / "one.json"
    file.write_bytes(orjson.dumps(decision_dump.content(paths, decision)))
    found = build_forest(plan_spec.read_file(file)[0])
    wanted = build_forest(paths)
    for name in ("start", "end", "num_queries", "tail_parent", "tail_start", "seq_lens"):
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
    assert orjson.loads(file.read_bytes())["decision"] == {
        "variant": "prefix", "reason": "predicted_faster", "stock_us": 3.0, "prefix_us": 2.0,
        "aligned": False,
    }  # fmt: skip


def test_a_deterministic_server_says_that_its_plans_are_aligned(tmp_path):
    deciding(tmp_path, 1, 1, deterministic=True)
    (file,) = tmp_path.iterdir()
    assert plan_spec.read_file(file)[1].endswith("which is not shown here")
    paths = PathTable.of([-1], [64], [0], [90])
    decision = Decision("stock", "predicted_slower", Prediction(2.0, 3.0))
    file.write_bytes(orjson.dumps(decision_dump.content(paths, decision, aligned=True)))
    said = plan_spec.read_file(file)[1]
    assert said.startswith("served: stock kernels (predicted_slower), predicted 3.0 us, stock ones")
    assert said.endswith("its plans are aligned (deterministic inference), which is not shown here")


def test_a_folder_that_cannot_be_written_is_counted_and_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        steps = deciding(tmp_path / "file", 1, 3)
    assert steps.counters.failed_dumps == 3
    assert caplog.text.count("PREFIX_ATTN_DUMP cannot be written") == 1
