"""doctor: each failure produced and named, with what to do; the command itself on this machine."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from sgl_prefix_attn import patches
from sgl_prefix_attn.execute.self_test_process import Subject, Verdict, remember
from sgl_prefix_attn.plugin.versions import CPU_HOOKS, RELEASES
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.record import Source
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools import doctor, doctor_facts, main
from sgl_prefix_attn.tools.doctor_checks import FAIL, OK, WARN, run_checks
from sgl_prefix_attn.tools.doctor_facts import EntryPoint, Facts, Hook

OURS = EntryPoint("sgl_prefix_attn.plugin.entry_point:register", "sgl-prefix-attn")
CPU = {"PREFIX_ATTN_CPU_PLATFORM": "1"}


def calibration(source: str, warning: bool) -> store.Found:
    message, key = f"calibration {source}: a.json", SimpleNamespace(fallback="flashinfer")
    return store.Found(SimpleNamespace(source=source, key=key), message, warning)


GOOD = Facts(
    python=(3, 11),
    env={},
    sglang="0.5.17",
    versions={name: "1.0" for name in doctor_facts.PACKAGES},
    plugins=(OURS,),
    hooks=(Hook("batch_requests", "sglang.a.b", "why", ""),),
    gpu="NVIDIA H100",
    arch=(9, 0),
    compiler="/usr/bin/cc",
    calibration=calibration("shipped", False),
)
ON_CPU = replace(
    GOOD,
    gpu="",
    arch=None,
    env=CPU,
    no_hopper="device:cpu",
    calibration=None,
)


def gpu(**changes) -> Facts:
    return replace(GOOD, **changes)


def cpu(**changes) -> Facts:
    return replace(ON_CPU, **changes)


def without(name: str) -> dict:
    return GOOD.versions | {name: None}


GONE = Hook("batch_requests", "sglang.a.b", "why", "a.b: no b")
CPU_GONE = Hook("cpu_last_loc", "sglang.c", "why", "no attribute c")
WANTED = {"PREFIX_ATTN_KERNELS": "hopper"}
FAULTS = {
    "no torch": (gpu(versions=without("torch")), "torch"),
    "no sglang": (gpu(sglang=None), "sglang"),
    "no flashinfer on a GPU": (gpu(versions=without("flashinfer-python")), "flashinfer-python"),
    "other sglang": (gpu(sglang="0.5.9"), "sglang"),
    "not installed": (gpu(plugins=()), "plugin entry point"),
    "installed twice": (gpu(plugins=(OURS, OURS)), "plugin entry point"),
    "name taken": (gpu(plugins=(EntryPoint("other:f", "other"),)), "plugin entry point"),
    "excluded": (gpu(env={"SGLANG_PLUGINS": "a, b"}), "plugin filters"),
    "platform excluded": (cpu(env=CPU | {"SGLANG_PLUGINS": "prefix_attn"}), "plugin filters"),
    "other platform": (gpu(env={"SGLANG_PLATFORM": "vendor"}), "plugin filters"),
    "SGLang's own platform": (gpu(env={"SGLANG_PLATFORM": "cuda"}), "plugin filters"),
    "bad value": (gpu(env={"PREFIX_ATTN_STRATEGY": "best"}), "settings"),
    "FlashInfer on a CPU": (cpu(env=CPU | {"PREFIX_ATTN_FALLBACK": "flashinfer"}), "settings"),
    "unknown variable": (gpu(env={"PREFIX_ATTN_SPEED": "1"}), "settings"),
    "an import of SGLang's": (gpu(sglang_error="RuntimeError: x", hooks=()), "hooks"),
    "hook target gone": (gpu(hooks=(GONE,)), "hook batch_requests"),
    "CPU hook target gone": (cpu(hooks=(CPU_GONE,)), "hook cpu_last_loc"),
    "no device": (cpu(env={}), "device"),
    "CPU engine of SGLang": (cpu(env=CPU | {"SGLANG_USE_CPU_ENGINE": "1"}), "device"),
    "old GPU": (gpu(arch=(7, 5)), "device"),
    "no compiler on a GPU": (gpu(compiler=""), "C compiler"),
    "a CC that is not there": (gpu(compiler="", env={"CC": "/no/cc"}), "C compiler"),
    "Hopper's kernels on another GPU": (gpu(no_hopper="compute:8.0", env=WANTED), "kernels"),
    "no calibration": (gpu(calibration="ImportError: x"), "calibration"),
}


@pytest.mark.parametrize(
    "case", [GOOD, gpu(gpu="NVIDIA A100", arch=(8, 0)), ON_CPU], ids=["gpu", "oldest", "cpu"]
)
def test_a_good_installation_works(case):
    assert {check.status for check in run_checks(case)} == {OK}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_fails_its_check_and_says_what_to_do(name):
    case, check_name = FAULTS[name]
    failed = [check for check in run_checks(case) if check.status == FAIL]
    assert check_name in {check.name for check in failed}
    assert all(check.fix for check in failed)
    assert not doctor.works(run_checks(case))


def test_a_local_build_of_sglang_is_the_same_version():
    case = gpu(sglang="0.5.17+cu130")
    assert doctor.works(run_checks(case))


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """The only folder on PATH, with an empty gcc and cc."""
    for name in ("gcc", "cc"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_the_compiler_is_the_one_that_triton_calls(programs, monkeypatch):
    assert doctor_facts._compiler() == str(programs / "gcc")
    monkeypatch.setenv("CC", "cc")
    assert doctor_facts._compiler() == str(programs / "cc")
    for cc in ("/nonexistent/cc", "gcc -m64", ""):  # Triton takes CC as it is
        monkeypatch.setenv("CC", cc)
        assert doctor_facts._compiler() == ""
    monkeypatch.delenv("CC")
    (programs / "gcc").unlink()
    assert doctor_facts._compiler() == "", "Triton looks for no cc"


@pytest.mark.parametrize(
    ("source", "warning"),
    [("scaled", False), ("conservative", True), ("measured", True), ("shipped", True)],
)
def test_without_a_calibration_for_this_gpu_the_backend_works_with_a_warning(source, warning):
    """Or with one of other versions."""
    checks = run_checks(gpu(calibration=calibration(source, warning)))
    (check,) = [check for check in checks if check.status == WARN]
    said = f"32/8 heads, beside flashinfer: {source}: a.json"
    assert (check.name, check.detail) == ("calibration", said)
    assert "sgl-prefix-attn calibrate" in check.fix and doctor.works(checks)


@pytest.mark.parametrize("source", get_args(Source))
def test_a_calibration_of_this_gpu_needs_no_other(source):
    checks = run_checks(gpu(calibration=calibration(source, False)))
    [check] = [check for check in checks if check.name == "calibration"]
    assert (check.status == OK) is (source not in ("scaled", "conservative"))


def test_the_calibration_of_a_gpu_is_looked_up(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X1")
    properties = SimpleNamespace(multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = doctor_facts._calibration("portable")
    assert found.calibration.source == "conservative" and found.warning
    assert "nothing is measured on NVIDIA X1" in found.message


@pytest.mark.parametrize(("python", "newest"), [((3, 10), "0.5.21"), ((3, 11), "0.5.23")])
def test_the_release_to_install_is_one_that_this_python_runs(python, newest):
    checks = run_checks(gpu(python=python, sglang=None))
    (check,) = [check for check in checks if check.name == "sglang"]
    assert check.fix == f"pip install sglang=={newest}"
    assert ("on Python 3.10 up to 0.5.21" in check.detail) == (python == (3, 10))


def test_an_sglang_that_was_not_tried_is_a_warning():
    checks = run_checks(gpu(sglang="0.5.99"))
    (check,) = [check for check in checks if check.status == WARN]
    assert check.name == "sglang" and doctor.works(checks)
    assert f"served as {RELEASES[-1].version}" in check.detail


def test_the_models_that_prefix_kernels_run_are_named():
    detail = "bfloat16, float16; heads of 16 to 256 dimensions; 1 to 128 query heads per KV head"
    assert doctor_facts._models("NVIDIA H100") == detail
    assert "float32; heads of any number of dimensions; 1 to" in doctor_facts._models("")
    (check,) = (c for c in run_checks(gpu(models=detail)) if c.name == "models")
    assert (check.status, check.detail) == (OK, f"{detail}; others run stock attention")


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (GOOD, "32/8 heads: Hopper kernels"),
        (gpu(no_hopper="compute:8.0"), "32/8 heads: portable kernels"),
        (gpu(env={"PREFIX_ATTN_KERNELS": "portable"}), "not Hopper's (kernels:portable)"),
        (ON_CPU, "portable kernels (Triton, torch on a CPU), not Hopper's (device:cpu)"),
    ],
)
def test_the_kernels_of_a_server_are_named(case, says):
    (check,) = (c for c in run_checks(case) if c.name == "kernels")
    assert check.status == OK and says in check.detail


def test_a_strategy_that_stops_the_start_is_a_failure():
    env = {"PREFIX_ATTN_STRATEGY": "pat"}
    (check,) = (c for c in run_checks(gpu(env=env)) if c.name == "kernels")
    assert check.status == FAIL and "PREFIX_ATTN_KERNELS=portable" in check.detail
    (check,) = (c for c in run_checks(gpu(env=env, no_hopper="x")) if c.name == "kernels")
    assert check.status == OK


def test_kernels_that_failed_their_self_test_are_a_warning():
    failed = replace(GOOD, failed_self_tests=(("28/4 heads: no end within 180 s", "/a/b.json"),))
    (check,) = (c for c in run_checks(failed) if c.name == "kernels")
    assert check.status == WARN and "28/4 heads: no end within 180 s" in check.detail
    assert check.fix.endswith("remove /a/b.json")
    (check,) = (c for c in run_checks(replace(failed, no_hopper="x")) if c.name == "kernels")
    assert check.status == OK, "they would not be tried anyway"


def test_verdicts_are_looked_up_next_to_the_calibrations(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert doctor_facts._failed_self_tests("NVIDIA H100") == ()
    subject = Subject("NVIDIA H100", HeadConfig(28, 4, 128), "float16", 0.0, store.versions())
    remember(store.verdict_folder(), Verdict(subject, "no end"))
    ((what, path),) = doctor_facts._failed_self_tests("NVIDIA H100")
    assert what == "28/4 heads of 128, float16: no end" and path.startswith(str(tmp_path))
    remember(store.verdict_folder(), Verdict(subject, None))
    assert doctor_facts._failed_self_tests("NVIDIA H100") == ()


@pytest.mark.parametrize(("capability", "why_not"), [((9, 0), None), ((10, 0), "compute:10.0")])
def test_whether_hoppers_kernels_run_is_looked_up(capability, why_not, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert doctor_facts._no_hopper() == why_not


def test_what_fails_while_it_is_looked_up_is_said():
    assert doctor_facts._tried(lambda: 1, str) == 1
    assert doctor_facts._tried(lambda: 1 / 0, str) == "ZeroDivisionError: division by zero"


def test_without_sglang_no_hook_is_blamed():
    failed = [c for c in run_checks(gpu(sglang=None)) if c.fix]
    assert [check.name for check in failed] == ["sglang"]
    assert failed[0].fix == f"pip install sglang=={RELEASES[-1].version}"


def test_what_the_cpu_can_do_without():
    case = cpu(versions=without("flashinfer-python"), compiler="")
    assert doctor.works(run_checks(case))
    hooks = (*GOOD.hooks, CPU_GONE)
    assert doctor.works(run_checks(gpu(hooks=hooks))), "not needed on a GPU"


@pytest.mark.parametrize(
    ("text", "is_asked"), [("1", True), (" 1 ", True), ("0", False), (" ", False), ("2", False)]
)
def test_the_cpu_platform_is_asked_for_as_the_settings_read_it(text, is_asked):
    case = cpu(env={"PREFIX_ATTN_CPU_PLATFORM": text})
    status = {check.name: check.status for check in run_checks(case)}
    assert status["device"] == (OK if is_asked else FAIL)
    assert status["settings"] == (FAIL if text == "2" else OK)


@pytest.mark.slow  # imports SGLang
def test_a_target_that_is_gone_is_seen(monkeypatch):
    patch = pytest.importorskip("sgl_prefix_attn.patches.cpu_no_triton")
    assert doctor_facts._hook("cpu_no_triton") == ("cpu_no_triton", patch.TARGET, patch.WHY, "")
    monkeypatch.setattr(patch, "TARGET", "sglang.srt.utils.common.no_such_function")
    assert "no_such_function" in doctor_facts._hook("cpu_no_triton").error


def test_a_hook_that_does_not_import_is_seen():
    assert doctor_facts._hook("no_such_hook").error.startswith("ModuleNotFoundError: ")


def test_every_patch_is_a_hook_of_the_release():
    """The report names what the table of releases names."""
    files = {path.stem for path in Path(patches.__path__[0]).glob("*.py")}
    assert files == {*CPU_HOOKS, *(name for r in RELEASES for name in r.hooks)}


@pytest.mark.slow  # imports SGLang
@pytest.mark.parametrize("opted_in", ["0", "1"])
def test_the_command_on_this_machine(opted_in, monkeypatch, capsys):
    monkeypatch.setattr(doctor_facts, "_gpu", lambda: ("", None))
    monkeypatch.setenv("PREFIX_ATTN_CPU_PLATFORM", opted_in)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setenv("CC", "/nonexistent/cc")
    status = main.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    compiler = next(c for c in report["checks"] if c["name"] == "C compiler")
    assert compiler["status"] == WARN and compiler["fix"] == "correct or unset CC"
    assert compiler["detail"].startswith("CC=/nonexistent/cc is no program")
    assert status == (0 if opted_in == "1" else 1)
    assert report["ok"] is (status == 0)
    failed = [check["name"] for check in report["checks"] if check["status"] == FAIL]
    assert failed == ([] if opted_in == "1" else ["device"])


@pytest.mark.slow  # imports SGLang
def test_sglang_loads_the_platform_as_in_a_server():
    """In a process of its own: what loads first decides."""
    named = {"SGLANG_PLATFORM": "prefix_attn_cpu", "PREFIX_ATTN_CPU_PLATFORM": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "sgl_prefix_attn", "doctor"],
        env=os.environ | named, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    assert "Failed to load plugin" not in ran.stderr


def test_the_report_fits_a_page_in_a_pipe_too(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(doctor, "gather", lambda: gpu(plugins=(), models="x " * 99))
    main.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert 90 < max(map(len, lines)) <= 100


def test_the_table_names_what_fails_and_the_fix(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gather", lambda: gpu(plugins=()))
    assert main.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "plugin entry point" in text and "pip install sgl-prefix-attn" in text
    assert "cannot work here" in text


@pytest.mark.parametrize("sglang", [None, "0.5.23"], ids=["not installed", "broken"])
def test_a_model_is_not_looked_at_without_sglang(sglang, monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    facts = gpu(sglang=sglang, sglang_error="ImportError: x", hooks=())
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    assert main.main(["doctor", "--model", str(tmp_path)]) == 1
    assert re.search(r"model +not looked at without SGLang", capsys.readouterr().out)


def test_ranks_are_those_of_a_model(capsys):
    assert main.main(["doctor", "--tp", "2"]) == 2
    assert "--tp: only with --model" in capsys.readouterr().err
