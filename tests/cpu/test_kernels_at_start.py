"""Which family of kernels a server starts with, and what it does where row tiles fail."""

import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
import torch

from sgl_prefix_attn.engine import build, sglang_config
from sgl_prefix_attn.execute import self_test, self_test_process
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.backends.torch_row_tiles import TorchRowTiles
from sgl_prefix_attn.execute.self_test import check_kernels, self_test_paths
from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.settings import Settings
from tests.support.parallel import ranks
from tests.support.torch_row_tiles import say_that_row_tiles_run

HEADS = HeadConfig(8, 2, 16)
FORCED = Settings(kernels="row_tiles")
SELF_TEST_VERDICT = build.self_test_verdict


def runner(soft_cap=0.0):
    layers = pytest.importorskip("sglang.srt.layers.radix_attention")
    layer = layers.RadixAttention(8, 16, 0.25, 2, layer_id=0, logit_cap=soft_cap)
    return SimpleNamespace(
        device="cpu",
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        model=torch.nn.Sequential(layer),
        req_to_token_pool=SimpleNamespace(size=4),
        max_total_num_tokens=256,
    )


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    say_that_row_tiles_run(monkeypatch.setattr)
    monkeypatch.setattr(sglang_config, "parallel", ranks)


def start(caplog, settings=Settings(), **options):  # noqa: B008
    """The execution, and whether it is row tiles; the log says the same."""
    with caplog.at_level(logging.INFO):
        built = build.build(runner(**options), HEADS, settings)
    row_tiles = isinstance(built.planner, RowTilePlanner)
    assert isinstance(built.executor.backend, TorchRowTiles if row_tiles else TorchBackend)
    assert isinstance(built.planner, RowTilePlanner if row_tiles else Planner)
    text = "steps run row tiles" if row_tiles else "steps run packs"
    assert text in caplog.text
    return built, row_tiles


@pytest.mark.parametrize("settings", [Settings(headroom=7), FORCED])
def test_a_hopper_gpu_starts_with_row_tiles(settings, caplog):
    built, row_tiles = start(caplog, settings)
    assert row_tiles and built.planner.headroom == settings.headroom
    padding = build.padding_plan(built.planner)
    assert padding.batch_size == 0 and built.executor.capacity.covers(padding)


@pytest.mark.parametrize(
    ("settings", "why"),
    [(Settings(kernels="triton"), "kernels:triton"), (Settings("pat"), "strategy:pat")],
)
def test_settings_that_ask_for_packs(settings, why, caplog):
    assert not start(caplog, settings)[1] and f"({why})" in caplog.text


def test_another_gpu_starts_with_packs(monkeypatch, caplog):
    monkeypatch.setattr(build, "why_no_row_tiles", lambda *args: "compute:8.0")
    assert not start(caplog)[1] and "(compute:8.0)" in caplog.text
    with pytest.raises(ValueError, match="compute:8.0"):
        build.build(runner(), HEADS, FORCED)


@pytest.fixture
def trying(monkeypatch, tmp_path):
    """Let starts try row tiles in a process, whose body is given; verdicts lie in tmp_path."""
    monkeypatch.setattr(build, "self_test_verdict", SELF_TEST_VERDICT)
    monkeypatch.setattr(build, "verdict_folder", lambda: tmp_path / "self_test")
    monkeypatch.setattr(self_test_process, "DEADLINE_S", 20.0)

    def body(code):
        monkeypatch.setattr(self_test_process, "_COMMAND", [sys.executable, "-c", code])

    return body


HANGS = "import time; print('waiting', flush=True); time.sleep(1000)"
FAILS = "raise RuntimeError('ptxas failed')"


def test_row_tiles_that_pass_are_tried_once(trying, caplog, tmp_path):
    trying("")
    assert start(caplog)[1]
    (path,) = (tmp_path / "self_test").iterdir()
    assert path.name == "cpu_8-2-16_float32.json"
    trying(FAILS)
    caplog.clear()
    assert start(caplog)[1] and "trying" not in caplog.text


@pytest.mark.parametrize(
    ("code", "deadline", "text"),
    [
        (FAILS, 20.0, "exit status 1: RuntimeError: ptxas failed"),
        (HANGS, 0.5, "no end within 0 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 20.0, "exit status -11: nothi"),
    ],
)
def test_row_tiles_that_fail_leave_packs(code, deadline, text, trying, caplog, monkeypatch):
    trying(code)
    monkeypatch.setattr(self_test_process, "DEADLINE_S", deadline)
    assert not start(caplog)[1]
    assert f"failed at start: {text}" in caplog.text and "(failed_at_start)" in caplog.text
    trying("")  # whatever they would do now: the verdict stands
    caplog.clear()
    assert not start(caplog)[1] and text in caplog.text and "trying" not in caplog.text


def test_where_the_device_has_no_room_the_next_start_tries_again(trying, caplog):
    trying(f"import sys; print('no room'); sys.exit({self_test_process.NOT_TRIED})")
    assert not start(caplog)[1] and "exit status 75: no room" in caplog.text
    trying("")
    assert start(caplog)[1]


@pytest.mark.parametrize("error", [RuntimeError, torch.AcceleratorError, torch.OutOfMemoryError])
def test_the_process_says_that_it_has_no_room(error, monkeypatch, capsys):
    def full(*args, **where):
        raise error("out of memory\nand much more")

    monkeypatch.setattr(self_test.torch, "empty", full)
    subject = self_test_process.Subject.of("cpu", HEADS, "float32", 0.0, {})
    arguments = [orjson.dumps(asdict(subject)).decode(), "cpu"]
    assert self_test.main(arguments) == self_test_process.NOT_TRIED
    assert capsys.readouterr().out == f"{error.__name__}: out of memory\n"


def test_a_device_that_fills_up_during_the_test_has_no_room(monkeypatch, capsys):
    def full(*args):
        raise torch.OutOfMemoryError("out of memory\nand much more")

    monkeypatch.setattr(TorchRowTiles, "forward", full)
    subject = self_test_process.Subject.of("cpu", HEADS, "float32", 0.0, {})
    arguments = [orjson.dumps(asdict(subject)).decode(), "cpu"]
    assert self_test.main(arguments) == self_test_process.NOT_TRIED
    assert capsys.readouterr().out == "OutOfMemoryError: out of memory\n"


def test_a_process_that_does_not_start_is_a_failure(trying, caplog, monkeypatch):
    trying("")
    monkeypatch.setattr(self_test_process, "_COMMAND", ["/no/such/python"])
    assert not start(caplog)[1] and "failed at start: not started: " in caplog.text


def test_what_hangs_is_killed_with_its_children(trying, caplog, monkeypatch, tmp_path):
    child = tmp_path / "child"
    code = f"import subprocess; p = subprocess.Popen(['sleep', '1000']); open({str(child)!r}, 'w')"
    trying(code + ".write(str(p.pid)); p.wait()")
    monkeypatch.setattr(self_test_process, "DEADLINE_S", 6.0)
    assert not start(caplog)[1]
    pid = int(child.read_text())
    for _ in range(200):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("what the self-test started is still there")


def test_wanted_row_tiles_are_tried_again_and_must_pass(trying, caplog):
    trying(FAILS)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="SGL_PREFIX_ATTN_KERNELS=row_tiles.*ptxas failed"):
            build.build(runner(), HEADS, FORCED)
    trying("")
    assert start(caplog, FORCED)[1] and start(caplog)[1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"subject": {}, "why_not": null}', "null"])
def test_a_file_that_is_no_verdict_is_made_anew(text, trying, caplog, tmp_path):
    trying("")
    start(caplog)
    (path,) = (tmp_path / "self_test").iterdir()
    good = path.read_bytes()
    path.write_text(text)
    caplog.clear()
    assert start(caplog)[1] and "is not used" in caplog.text
    assert path.read_bytes() == good


def test_a_verdict_is_for_its_versions_kernels_and_layers_alone(trying, caplog, monkeypatch):
    trying("")
    start(caplog)
    trying(FAILS)
    assert start(caplog)[1]
    with monkeypatch.context() as changed:
        changed.setattr(self_test_process, "code_digest", lambda: "another")
        assert not start(caplog)[1]
    with monkeypatch.context() as changed:
        changed.setattr(build, "versions", lambda: {"triton": "9.9"})
        assert not start(caplog)[1]
    assert not start(caplog, soft_cap=30.0)[1]


@pytest.mark.parametrize(
    "name",
    [
        "kernels/gluon/consumer.py",
        "execute/backends/gluon_backend.py",
        "execute/self_test.py",
        "plan/row_tile_order.py",
        "plan/row_tile_words.py",
    ],
)
def test_a_verdict_is_for_the_code_that_was_tried(name, monkeypatch):
    read, here = Path.read_bytes, self_test_process.code_digest()

    def changed(path):
        return read(path) + b"# changed" * str(path).endswith(name)

    monkeypatch.setattr(Path, "read_bytes", changed)
    assert self_test_process.code_digest() != here


def test_without_a_folder_for_verdicts_each_start_tries(trying, caplog, monkeypatch, tmp_path):
    trying("")
    monkeypatch.setattr(build, "verdict_folder", lambda: None)
    assert start(caplog)[1]
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(build, "verdict_folder", lambda: tmp_path / "file" / "below")
    assert start(caplog)[1] and "is not kept" in caplog.text


def test_the_process_is_told_what_to_try(trying, caplog, monkeypatch, tmp_path):
    seen = tmp_path / "seen"
    code = f"import sys; open({str(seen)!r}, 'w').write(chr(10).join(sys.argv[1:]))"
    trying(code)
    assert start(caplog, soft_cap=30.0)[1]
    subject, device = seen.read_text().split("\n")
    told = orjson.loads(subject)
    assert device == "cpu" and told["soft_cap"] == 30.0 and told["dtype"] == "float32"
    assert told["heads"] == {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 16}


def test_doctor_finds_what_failed(trying, caplog, monkeypatch, tmp_path):
    trying(FAILS)
    start(caplog)
    folder = tmp_path / "self_test"
    ((path, said),) = self_test_process.failures(folder, "cpu", build.versions())
    assert path.parent == folder and "8/2 heads of 16, float32" in str(said.subject)
    assert "ptxas failed" in said.why_not
    (folder / "broken.json").write_text("{")
    assert len(self_test_process.failures(folder, "cpu", build.versions())) == 1
    assert not self_test_process.failures(folder, "cpu", {"triton": "9.9"})
    assert not self_test_process.failures(folder, "another", build.versions())


def test_ranks_start_alike(monkeypatch, caplog):
    """What the first rank heard holds for all."""
    asked = []
    failed = SimpleNamespace(why_not="slow GPU")
    monkeypatch.setattr(build, "of_first_rank", lambda make: asked.append(make) or failed)
    assert not start(caplog)[1] and len(asked) == 1 and "slow GPU" in caplog.text


@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
def test_the_process_tries_whole_and_split_tiles(soft_cap, monkeypatch):
    """Its program, run here, with torch for the kernels."""
    caps, parts, forward = set(), set(), TorchRowTiles.forward

    def noting(self, workspace, layer):
        caps.add(layer.soft_cap)
        parts.add(int(workspace.words[W.HEADER_WORDS + W.I_PARTS]))
        forward(self, workspace, layer)

    monkeypatch.setattr(TorchRowTiles, "forward", noting)
    versions = {"triton": "3.6"}
    subject = self_test_process.Subject.of("cpu", HEADS, "float32", soft_cap, versions)
    assert self_test.main([orjson.dumps(asdict(subject)).decode(), "cpu"]) == 0
    assert caps == {soft_cap} and min(parts) == 1 and max(parts) > 1
    monkeypatch.setattr(TorchRowTiles, "forward", lambda *args: None)
    with pytest.raises(RuntimeError, match="self-test is nan off"):
        self_test.main([orjson.dumps(asdict(subject)).decode(), "cpu"])


@pytest.mark.parametrize("fault", ["append", "fill"])
def test_the_self_test_finds_a_step_that_is_skipped(fault, monkeypatch):
    monkeypatch.setattr(TorchRowTiles, fault, lambda *args: None)
    device = torch.device("cpu")
    backend = TorchRowTiles(HEADS, torch.float32, device)
    plan = RowTilePlanner(HEADS, num_sms=16, headroom=2).plan(self_test_paths())
    with pytest.raises((RuntimeError, AssertionError)):
        check_kernels(backend, [plan], HEADS, torch.float32, device, 0.0)


def test_the_self_test_covers_split_tiles_and_whole_ones():
    planner = RowTilePlanner(HeadConfig(32, 8, 128), num_sms=132)
    cuts = planner.cuts(build_forest(self_test_paths()))
    parts = {int(cut.parts.max()) for cut in cuts}
    assert min(parts) == 1 and max(parts) > 1
