"""Which kernels a server starts with, and what it does where Hopper's fail."""

import logging
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
import torch

from sgl_prefix_attn.engine import build, sglang_config
from sgl_prefix_attn.execute import row_sums, self_test, self_test_process
from sgl_prefix_attn.execute.backends import choice
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.self_test import check_kernels, self_test_paths
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import FLASHINFER, HeadConfig
from sgl_prefix_attn.settings import Settings
from tests.support.parallel import ranks
from tests.support.torch_hopper import TorchHopper, as_on_hopper

HEADS = HeadConfig(8, 2, 16)
FORCED = Settings(kernels="hopper")
SELF_TEST_VERDICT = build.self_test_verdict


def runner(soft_cap=0.0, sinks=False, deterministic=False):
    layers = pytest.importorskip("sglang.srt.layers.radix_attention")
    layer = layers.RadixAttention(8, 16, 0.25, 2, layer_id=0, logit_cap=soft_cap)
    if sinks:
        layer.sinks = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    return SimpleNamespace(
        device="cpu",
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        model=torch.nn.Sequential(layer),
        model_config=SimpleNamespace(has_attention_sinks=sinks, context_len=64),
        server_args=SimpleNamespace(enable_deterministic_inference=deterministic),
        req_to_token_pool=SimpleNamespace(size=4),
        max_total_num_tokens=256,
    )


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    as_on_hopper(monkeypatch.setattr)
    monkeypatch.setattr(sglang_config, "parallel", ranks)
    monkeypatch.setattr(sglang_config, "options", lambda server_args: server_args)


def start(caplog, settings=Settings(), **options):  # noqa: B008
    """The execution, and whether it has Hopper's kernels; the log says the same."""
    with caplog.at_level(logging.INFO):
        built = build.build(runner(**options), HEADS, settings, FLASHINFER)
    is_hopper = isinstance(built.executor.backend, TorchHopper)
    assert built.planner.tile_rows == built.executor.backend.tile_rows
    assert f"steps run {'Hopper' if is_hopper else 'portable'} kernels" in caplog.text
    return built, is_hopper


@pytest.mark.parametrize("settings", [Settings(headroom=7), FORCED])
def test_a_hopper_gpu_starts_with_its_kernels(settings, caplog):
    built, is_hopper = start(caplog, settings)
    assert is_hopper and built.planner.headroom == settings.headroom
    padding = build.padding_plan(built.planner)
    assert padding.batch_size == 0 and built.executor.capacity.covers(padding)


@pytest.mark.parametrize("strategy", ["calibrated", "pat"])
def test_settings_that_ask_for_portable_kernels(strategy, caplog):
    settings = Settings(strategy, kernels="portable")
    assert not start(caplog, settings)[1] and "(kernels:portable)" in caplog.text
    refused = pytest.raises(ValueError, match="PREFIX_ATTN_KERNELS=portable")
    with nullcontext() if strategy == "calibrated" else refused:
        assert start(caplog, Settings(strategy))[1]


def test_another_gpu_starts_with_portable_kernels(monkeypatch, caplog):
    monkeypatch.setattr(build, "why_no_hopper", lambda *args: "compute:8.0")
    assert not start(caplog)[1] and "(compute:8.0)" in caplog.text
    with pytest.raises(ValueError, match="compute:8.0"):
        build.build(runner(), HEADS, FORCED, FLASHINFER)


@pytest.fixture
def trying(monkeypatch, tmp_path):
    """Let starts try kernels in a process, whose body is given; verdicts lie in tmp_path."""
    monkeypatch.setattr(build, "self_test_verdict", SELF_TEST_VERDICT)
    monkeypatch.setattr(build, "verdict_folder", lambda: tmp_path / "self_test")
    monkeypatch.setattr(self_test_process, "DEADLINE_S", 20.0)

    def body(code):
        monkeypatch.setattr(self_test_process, "_COMMAND", [sys.executable, "-c", code])

    return body


HANGS = "import time; print('waiting', flush=True); time.sleep(1000)"
FAILS = "raise RuntimeError('ptxas failed')"


def test_kernels_that_pass_are_tried_once(trying, caplog, tmp_path):
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
def test_kernels_that_fail_leave_others(code, deadline, text, trying, caplog, monkeypatch):
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
    subject = self_test_process.Subject("cpu", HEADS, "float32", 0.0, {})
    arguments = [orjson.dumps(asdict(subject)).decode(), "cpu"]
    assert self_test.main(arguments) == self_test_process.NOT_TRIED
    assert capsys.readouterr().out == f"{error.__name__}: out of memory\n"


def test_a_device_that_fills_up_during_the_test_has_no_room(monkeypatch, capsys):
    def full(*args):
        raise torch.OutOfMemoryError("out of memory\nand much more")

    monkeypatch.setattr(TorchBackend, "forward", full)
    subject = self_test_process.Subject("cpu", HEADS, "float32", 0.0, {})
    arguments = [orjson.dumps(asdict(subject)).decode(), "cpu"]
    assert self_test.main(arguments) == self_test_process.NOT_TRIED
    assert capsys.readouterr().out == "OutOfMemoryError: out of memory\n"


def test_a_process_that_does_not_start_is_a_failure(trying, caplog, monkeypatch):
    trying("")
    monkeypatch.setattr(self_test_process, "_COMMAND", ["/no/such/python"])
    assert not start(caplog)[1] and "failed at start: not started: " in caplog.text


def test_without_a_temporary_folder_it_does_not_start(trying, caplog, monkeypatch):
    def no_folder():
        raise FileNotFoundError("No usable temporary directory found")

    trying("")
    monkeypatch.setattr(self_test_process.tempfile, "TemporaryFile", no_folder)
    assert not start(caplog)[1] and "not started: No usable temporary directory" in caplog.text


@pytest.mark.slow
def test_what_hangs_is_killed_with_its_children(trying, caplog, monkeypatch, tmp_path):
    child = tmp_path / "child"
    code = f"import subprocess; p = subprocess.Popen(['sleep', '1000']); open({str(child)!r}, 'w')"
    trying(code + ".write(str(p.pid)); p.wait()")
    monkeypatch.setattr(self_test_process, "DEADLINE_S", 6.0)
    assert not start(caplog)[1]
    pid = int(child.read_text())
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("what the self-test started is still there")


def test_wanted_kernels_are_tried_again_and_must_pass(trying, caplog):
    trying(FAILS)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="PREFIX_ATTN_KERNELS=hopper.*ptxas failed"):
            build.build(runner(), HEADS, FORCED, FLASHINFER)
    trying("")
    assert start(caplog, FORCED)[1] and start(caplog)[1]


def test_kernels_over_latent_kv_that_fail_leave_none(trying, caplog, monkeypatch):
    """There are no portable ones: the caller is told so, and not by a ValueError of theirs."""
    monkeypatch.setattr(choice, "_runs_triton", lambda device: True)  # as on a GPU
    trying(FAILS)
    latent = HeadConfig(16, 1, 576, 512)
    with pytest.raises(build.NoKernels, match="^failed_at_start$"):
        build.build(runner(), latent, Settings(), FLASHINFER)
    assert "failed at start: exit status 1: RuntimeError: ptxas failed" in caplog.text
    with pytest.raises(RuntimeError, match="PREFIX_ATTN_KERNELS=hopper.*ptxas failed"):
        build.build(runner(), latent, FORCED, FLASHINFER)
    for settings, named in (
        (Settings(kernels="portable"), r"PREFIX_ATTN_KERNELS=portable.*\(layers:latent\)"),
        (Settings("pat"), r"PREFIX_ATTN_STRATEGY=pat.*\(layers:latent\)"),
    ):
        with pytest.raises(ValueError, match=named):
            build.build(runner(), latent, settings, FLASHINFER)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"subject": {}, "why_not": null}', "null"])
def test_a_file_that_is_no_verdict_is_made_anew(text, trying, caplog, tmp_path):
    trying("")
    start(caplog)
    (path,) = (tmp_path / "self_test").iterdir()
    good = path.read_bytes()
    path.write_text(text)
    caplog.clear()
    assert start(caplog)[1] and "cannot be read" in caplog.text
    assert path.read_bytes() == good


def test_a_verdict_is_for_its_versions_kernels_and_layers_alone(trying, caplog, monkeypatch):
    trying("")
    start(caplog)
    trying(FAILS)
    assert not start(caplog, soft_cap=30.0)[1]
    assert not start(caplog, sinks=True)[1]
    assert not start(caplog, deterministic=True)[1]
    assert start(caplog)[1], "each verdict has a file"
    with monkeypatch.context() as changed:
        changed.setattr(self_test_process, "code_digest", lambda: "another")
        assert not start(caplog)[1]
    with monkeypatch.context() as changed:
        changed.setattr(build, "versions", lambda: {"triton": "9.9"})
        assert not start(caplog)[1]


@pytest.mark.parametrize(
    "name",
    [
        "kernels/hopper/consumer.py",
        "execute/backends/hopper_backend.py",
        "execute/backends/kernel_backend.py",
        "execute/rounding.py",
        "execute/self_test.py",
        "plan/block_order.py",
        "plan/serialize.py",
        "plan/shared_words.py",
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
    assert start(caplog, soft_cap=30.0, sinks=True)[1]
    subject, device = seen.read_text().split("\n")
    told = orjson.loads(subject)
    assert device == "cpu" and told["soft_cap"] == 30.0 and told["dtype"] == "float32"
    assert told["sinks"] == "bfloat16" and told["part_tokens"] == 0
    assert HeadConfig(**told["heads"]) == HeadConfig(8, 2, 16)
    built, is_hopper = start(caplog, deterministic=True)
    told = orjson.loads(seen.read_text().split("\n")[0])
    assert is_hopper and told["part_tokens"] == built.planner.part_tokens > 0
    assert "8/2 heads of 16, float32, aligned plans" in caplog.text


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


@pytest.mark.parametrize(("soft_cap", "sinks"), [(0.0, ""), (30.0, ""), (0.0, "bfloat16")])
def test_the_process_tries_whole_and_split_tiles(soft_cap, sinks, monkeypatch):
    """Its program, run here, with torch for the kernels."""
    kinds, parts, forward = set(), set(), TorchBackend.forward

    def noting(self, workspace, layer):
        kinds.add((layer.soft_cap, layer.sinks is not None and layer.sinks.dtype))
        parts.add(int(workspace.words[W.HEADER_WORDS + W.I_PARTS]))
        forward(self, workspace, layer)

    monkeypatch.setattr(TorchBackend, "forward", noting)
    versions = {"triton": "3.6"}
    subject = self_test_process.Subject("cpu", HEADS, "float32", soft_cap, versions, sinks)
    assert self_test.main([orjson.dumps(asdict(subject)).decode(), "cpu"]) == 0
    assert kinds == {(soft_cap, bool(sinks) and torch.bfloat16)}
    assert min(parts) == 1 and max(parts) > 1
    monkeypatch.setattr(TorchBackend, "forward", lambda *args: None)
    with pytest.raises(RuntimeError, match="self-test is off full attention: row 0 is off by nan"):
        self_test.main([orjson.dumps(asdict(subject)).decode(), "cpu"])


def aligned(dtype):
    return self_test_process.Subject("cpu", HEADS, dtype, 0.0, {}, part_tokens=2048)


def test_the_process_tries_aligned_plans(monkeypatch):
    """In whole and split tiles: of parts as the server's, and of shorter ones."""
    tried, forward = Counter(), TorchBackend.forward

    def noting(self, workspace, layer):
        words, size = workspace.words, W.item_words(4, W.TILE_ROWS)
        items = words[W.HEADER_WORDS :][: words[W.H_NUM_ITEMS] * size].view(-1, size)
        part_tokens, most = int(words[W.H_PART_TOKENS]), int(items[:, W.I_PARTS].max())
        tried[part_tokens] = max(tried[part_tokens], most)
        forward(self, workspace, layer)

    monkeypatch.setattr(TorchBackend, "forward", noting)
    assert self_test.main([orjson.dumps(asdict(aligned("float32"))).decode(), "cpu"]) == 0
    assert tried == {2048: 1, 256: 2, 128: 4}


def test_kernels_by_which_bits_follow_the_plan_fail(monkeypatch):
    """Partial results in half precision: what a request loses depends on how many parts its tile
    has, that is on who is in it."""
    merged = row_sums.merged

    def rounded(parts):
        return merged([x._replace(acc=x.acc.half().float()) for x in parts] if parts[1:] else parts)

    monkeypatch.setattr(row_sums, "merged", rounded)
    with pytest.raises(RuntimeError, match="self-test: another plan gives a request other bits"):
        self_test.main([orjson.dumps(asdict(aligned("bfloat16"))).decode(), "cpu"])


@pytest.mark.parametrize("scale", [None, "k_scale", "v_scale"])
def test_the_process_tries_caches_of_e4m3(scale, monkeypatch, capsys):
    """scale: which the kernels leave out."""
    caches, forward = set(), TorchBackend.forward

    def noting(self, workspace, layer):
        caches.add(layer.k_cache.dtype)
        forward(self, workspace, replace(layer, **({scale: 1.0} if scale else {})))

    monkeypatch.setattr(TorchBackend, "forward", noting)
    subject = self_test_process.Subject("cpu", HEADS, "bfloat16", 0.0, {}, kv_dtype="float8_e4m3fn")
    arguments = [orjson.dumps(asdict(subject)).decode(), "cpu"]
    if scale is None:
        assert self_test.main(arguments) == 0
    else:
        with pytest.raises(RuntimeError, match="self-test is off full attention: row 0 is off"):
            self_test.main(arguments)
    assert caches == {torch.float8_e4m3fn}


def test_a_verdict_on_caches_of_e4m3_is_one_of_its_own(tmp_path):
    subjects = [
        self_test_process.Subject("cpu", HEADS, "bfloat16", 0.0, {}, kv_dtype=kv_dtype)
        for kv_dtype in ("", "float8_e4m3fn")
    ]
    assert str(subjects[1]).endswith("bfloat16-float8_e4m3fn")
    for subject, why_not in zip(subjects, (None, "slow"), strict=True):
        self_test_process.remember(tmp_path, self_test_process.Verdict(subject, why_not))
    verdicts = [self_test_process.remembered(tmp_path, subject) for subject in subjects]
    assert [verdict.why_not for verdict in verdicts] == [None, "slow"]


@pytest.mark.parametrize("fault", ["append", "fill"])
def test_the_self_test_finds_a_step_that_is_skipped(fault, monkeypatch):
    monkeypatch.setattr(TorchBackend, fault, lambda *args: None)
    device = torch.device("cpu")
    backend = TorchBackend(HEADS, torch.float32, device)
    planner = Planner(HEADS, num_sms=16, headroom=2, tile_rows=backend.tile_rows)
    plan = planner.plan(self_test_paths())
    with pytest.raises((RuntimeError, AssertionError)):
        check_kernels(backend, [plan], 0.0)


def test_the_self_test_covers_split_tiles_and_whole_ones():
    planner = Planner(HeadConfig(32, 8, 128), num_sms=132)
    cuts = planner.cuts(build_forest(self_test_paths()))
    parts = {int(cut.parts.max()) for cut in cuts}
    assert min(parts) == 1 and max(parts) > 1
