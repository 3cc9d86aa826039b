"""Real engines for tests: one process per configuration and backend, several scenarios each.

They are forks of a process that has imported SGLang, which takes longer than most scenarios; but
those with variables of SGLang's own, some of which it reads as it is imported."""

import json
import os
import runpy
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = "prefix_attn_engine_tests"
forkserver.set_forkserver_preload(["sglang.srt.entrypoints.engine"])
Process = ForkServerProcess | SpawnProcess
_ALWAYS = {
    "PREFIX_ATTN_CPU_PLATFORM": "1",
    # Two engines run side by side: threads that spin for each other cost ten times the work.
    "OMP_NUM_THREADS": "1",
}
_TIMEOUT_S = 420  # on a GPU the first engine compiles FlashInfer's kernels

STOCK = "torch_native"
PREFIX = "prefix"


@dataclass(frozen=True)
class Config:
    """Engine arguments and environment; scenarios as (name, fault) pairs."""

    name: str
    scenarios: tuple[tuple[str, str], ...]
    engine: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """outputs and steps by (scenario, fault); log is all that the engine printed."""

    outputs: dict
    steps: dict
    log: str


def plain(*names: str) -> tuple[tuple[str, str], ...]:
    """Scenarios without a fault."""
    return tuple((name, "") for name in names)


def _start(config: Config, backend: str, model: Path, folder: Path) -> Process:
    folder.mkdir(parents=True)
    _write_site(folder / "site")
    job = {
        "engine": {
            "model_path": str(model),
            "device": "cpu",
            "attention_backend": backend,
            "dtype": "float32",
            "max_total_tokens": 8192,
            "max_running_requests": 16,
            "skip_server_warmup": True,
            "log_level": "info",
            **config.engine,
        },
        "scenarios": config.scenarios,
        "steps": str(folder / "steps.jsonl"),
        "fault": str(folder / "fault"),
        "results": str(folder / "results.json"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFIX_ATTN_")}
    env |= {
        **_ALWAYS,
        "PYTHONPATH": os.pathsep.join(
            [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep),
        "PROBE_STEPS": job["steps"],
        "PROBE_FAULT": job["fault"],
        **config.env,
    }
    on_gpu = job["engine"]["device"] == "cuda"  # whose context does not survive a fork
    alone = on_gpu or any(name.startswith("SGLANG_") for name in config.env)
    process = (SpawnProcess if alone else ForkServerProcess)(target=_drive, args=(folder, env))
    with patch.dict(os.environ, _ALWAYS):
        process.start()
    return process


def _drive(folder: Path, env: dict[str, str]) -> None:
    """Become the driver of the job in a folder, as `python -m PACKAGE.driver` would be with this
    environment."""
    os.setsid()
    os.chdir(folder)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [
        str(folder / "site"),
        *(path for path in sys.path if path not in ("", str(ROOT))),
    ]
    sys.argv[:] = ["driver", str(folder / "job.json")]
    runpy.run_module(f"{PACKAGE}.driver", run_name="__main__", alter_sys=True)


def run_all(jobs: dict[Path, tuple[Config, str, Path]]) -> None:
    """Run (configuration, backend, model) in each folder, all at once and within one time limit,
    for result() to read. None outlives this, whatever ends it."""
    until = time.monotonic() + _TIMEOUT_S
    started: dict[Path, Process] = {}
    try:
        for folder, job in jobs.items():
            started[folder] = _start(*job, folder)
        for process in started.values():
            process.join(max(0.0, until - time.monotonic()))
    finally:
        for folder, process in started.items():
            code = process.exitcode
            _end(process)
            (folder / "exit").write_text("a timeout" if code is None else str(code))


def result(folder: Path) -> Run:
    """What a driver left. Raises AssertionError with the end of its log when it failed."""
    log = (folder / "log").read_text(errors="replace")
    code = (folder / "exit").read_text()
    assert code == "0", f"engine ended with {code}:\n{log[-4000:]}"
    results = json.loads((folder / "results.json").read_text())
    key = [(result["scenario"], result["fault"]) for result in results]
    return Run(
        outputs={k: r["outputs"] for k, r in zip(key, results, strict=True)},
        steps={k: r["steps"] for k, r in zip(key, results, strict=True)},
        log=log,
    )


def run_together(jobs: dict[str, tuple[Config, str]], model: Path, folder: Path) -> dict[str, Run]:
    """Runs of (configuration, backend) by name."""
    run_all({folder / name: (*job, model) for name, job in jobs.items()})
    return {name: result(folder / name) for name in jobs}


def _end(process: Process) -> None:
    """End the driver's own process group: SGLang's children outlive a parent that was killed."""
    with suppress(ProcessLookupError):  # it has ended, or has no group of its own yet
        os.killpg(process.pid, 9)
    process.kill()
    process.join(30)


def _write_site(site: Path) -> None:
    """A folder for PYTHONPATH with this one as package PACKAGE, and the probe's entry point.

    The checkout itself must not be on the path: its kernels/ would hide a package that SGLang has.
    """
    info = site / "prefix_attn_probe-0.dist-info"
    info.mkdir(parents=True)
    (site / PACKAGE).symlink_to(HERE)
    for name in ("eval", "tests"):  # of which the probe uses some
        (site / name).symlink_to(HERE.parents[1] / name)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prefix-attn-probe\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\nprefix_attn_probe = {PACKAGE}.probe:register\n"
    )
