"""One SGLang engine in its own process group, driven from an evaluation.

An evaluation may load a module of its own into the engine's processes (to time our code there, or
to plant a fault): it is registered as an SGLang plugin through an entry point that exists only in
the engine's work folder. The product knows nothing of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from eval.engine_worker import MARK
from eval.provenance import ROOT

_LOG_TAIL_LINES = 30
_ERROR = re.compile(r"\b\w*(Error|Exception)\b: ")
_EVAL_PLUGIN = "eval_plugin"
# The product's entry points in pyproject.toml.
_PRODUCT, _PRODUCT_PLATFORM = "prefix_attn", "prefix_attn_cpu"
# One thread: more of them wait for each other longer than they compute.
CPU_ENV = {"PREFIX_ATTN_CPU_PLATFORM": "1", "OMP_NUM_THREADS": "1"}


class EngineError(RuntimeError):
    """The engine did not start, died, or refused a command; the message ends with its log."""


class EngineProcess:
    """Context manager: the engine is starting inside, and all of its processes end with it.

    start_s: how long the engine took to be ready; plugins: names of the SGLang plugins that it
    loaded, which are those asked for.

    arguments  of sglang.Engine
    plugin     dotted name of a module with a register() that SGLang calls in every process
    product    False: SGLang as it is without this project's plugin; on a CPU, where the engine
               runs on the platform that the plugin brings, it is loaded all the same
    """

    def __init__(
        self, arguments: dict, folder: Path, *, plugin: str | None = None, product: bool = True,
        env: dict[str, str] | None = None,
    ):  # fmt: skip
        folder.mkdir(parents=True)
        site = make_site(folder / "site", plugin)
        config = folder / "engine.json"
        config.write_text(json.dumps(arguments))
        self._log_path = folder / "log"
        on_cpu = arguments.get("device") == "cpu"
        self._wanted = plugin_names(product=product or on_cpu, evaluation=plugin is not None)
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "eval.engine_worker", str(config)], cwd=folder,
                env=environment(os.environ | (env or {}), site, self._wanted, on_cpu=on_cpu),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> EngineProcess:
        return self

    def wait_until_up(self) -> None:
        """Wait until the engine answers. Raises EngineError: it ended, or has other plugins."""
        started = self._read()
        if started["plugins"] != self._wanted:
            raise EngineError(
                f"the engine loaded the plugins {started['plugins']}, not {self._wanted}:\n"
                + log_tail(self._log_path)
            )
        self.start_s: float = started["start_s"]
        self.plugins: list[str] = started["plugins"]

    def __exit__(self, *_) -> None:
        end_group(self._process)
        self._process.stdin.close()
        self._process.stdout.close()

    def ask(self, op: str, **arguments) -> dict:
        """Return the answer to a command of engine_worker. Raises EngineError."""
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"the engine is gone:\n{log_tail(self._log_path)}") from None
        answer = self._read()
        if "error" in answer:
            raise EngineError(f"{op}: {answer['error']}\n{log_tail(self._log_path)}")
        return answer

    def _read(self) -> dict:
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        status = self._process.wait()
        raise EngineError(f"the engine ended with {status}:\n{log_tail(self._log_path)}")


def start_session(words: Sequence[str], log: Path, env: Mapping[str, str] | None):
    """Start a Python module with its arguments and its output in a log, in a session of its own:
    one signal then reaches all of its processes."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *words], env=env, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def log_tail(log: Path) -> str:
    """Return the last lines of a log, behind the first that names an error: what follows on a crash
    can be longer than they are."""
    lines = log.read_text(errors="replace").splitlines()
    tail = lines[-_LOG_TAIL_LINES:]
    first = next((line for line in lines[:-_LOG_TAIL_LINES] if _ERROR.search(line)), None)
    return "\n".join(tail if first is None else [first, "...", *tail])


def end_group(process: subprocess.Popen) -> None:
    """End every process of a session: SGLang's children outlive a parent that was killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_on_sigterm() -> None:
    """Let a terminated evaluation leave its `with` blocks, which end the engines."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def backend_arguments(backend: str) -> dict:
    """Return engine arguments of a backend name; PREFILL/DECODE gives each its own."""
    prefill, _, decode = _in_sglang(backend).partition("/")
    if not decode:
        return {"attention_backend": prefill}
    return {"prefill_attention_backend": prefill, "decode_attention_backend": decode}


def backend_env(backend: str) -> dict[str, str]:
    """Return environment variables of a backend name: prefix:KERNELS forces a family of kernels,
    prefix/DECODE lets prefill run plans."""
    kernels = backend.partition(":")[2]
    env = {"PREFIX_ATTN_KERNELS": kernels} if kernels else {}
    return env | ({"PREFIX_ATTN_PREFILL": "1"} if backend.startswith("prefix/") else {})


def folder_name(backend: str) -> str:
    """Name a folder for a backend, one that may stand on a search path."""
    return backend.translate(str.maketrans("/:+", "---"))


def uses_prefix(backend: str) -> bool:
    return _in_sglang(backend).rpartition("/")[2] == "prefix"


def names_prefix(backend: str) -> bool:
    """Tell whether SGLang needs the product's plugin to know the backend."""
    return "prefix" in _in_sglang(backend).split("/")


def _in_sglang(backend: str) -> str:
    return backend.partition(":")[0]


def plugin_names(*, product: bool, evaluation: bool) -> list[str]:
    """Name the entry points of SGLang plugins that an engine loads, sorted."""
    return [_EVAL_PLUGIN] * evaluation + [_PRODUCT] * product


def environment(
    base: Mapping[str, str], site: Path, plugins: list[str], *, on_cpu: bool
) -> dict[str, str]:
    """Return `base` with `site` first on the path and SGLANG_PLUGINS naming all that may load."""
    # The list filters platforms too. Were it empty, SGLang would load everything installed.
    names = [*plugins, _PRODUCT_PLATFORM] if on_cpu else plugins or [_EVAL_PLUGIN]
    return {
        **base,
        **(CPU_ENV if on_cpu else {}),
        "SGLANG_PLUGINS": ",".join(names),
        "PYTHONPATH": python_path(site, base),
    }


def python_path(site: Path, base: Mapping[str, str]) -> str:
    """Put a folder before the search path of an environment."""
    return os.pathsep.join(filter(None, [str(site), base.get("PYTHONPATH", "")]))


def make_site(site: Path, plugin: str | None) -> Path:
    """Make a folder for the engine's path: eval and the package, both of the checkout that the
    result is labelled with, and the entry point of the evaluation's plugin."""
    site.mkdir()
    for package in ("eval", "sgl_prefix_attn"):
        (site / package).symlink_to(ROOT / package, target_is_directory=True)
    if plugin is None:
        return site
    info = site / "eval_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eval-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{_EVAL_PLUGIN} = {plugin}:register\n"
    )
    return site
