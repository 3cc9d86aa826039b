"""One SGLang HTTP server as a child process: start, wait until healthy, read counters, stop.

    with ServerProcess(arguments, log=folder / "server.log", env=environment) as server:
        server.wait_until_healthy()
        before = server.counters()
        ...  # requests to server.url
        server.flush_cache()

`backend_server` makes one of an evaluation's backend name, such as default, fa3, prefix or
fa3/prefix:row_tiles. Every process of a server is ended when its `with` block is left, by whatever
exception (engine_process.end_on_sigterm makes one of SIGTERM).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from eval.engine_process import (
    backend_arguments,
    backend_env,
    environment,
    folder_name,
    make_site,
    names_prefix,
    plugin_names,
)

DEFAULT = "default"  # the attention backend that SGLang picks
LOG_TAIL_LINES = 30
_POLL_S, _TELL_EVERY_S = 0.5, 10.0
_FLUSH_LIMIT_S = 60.0
# One thread: more of them wait for each other longer than they compute.
CPU_ENV = {"SGL_PREFIX_ATTN_CPU_PLATFORM": "1", "OMP_NUM_THREADS": "1"}

Counters = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class ServerError(RuntimeError):
    """The server did not start or ended: one sentence, and the end of its log."""

    def __init__(self, sentence: str, log_tail: str):
        super().__init__(sentence)
        self.log_tail = log_tail


class ServerProcess:
    """Context manager: the server is starting inside, and all of its processes end with it.

    arguments      of sglang.launch_server but for --host and --port
    log            file for its output; its folder is made
    env            its whole environment; None: this process's
    port           None: a free one
    start_limit_s  wait_until_healthy waits so long
    progress       is told what is waited for
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        start_limit_s: float = 600.0,
        progress: Callable[[str], object] = print,
    ):
        self.log = log
        self.url = ""
        self.arguments, self.env, self._port = list(arguments), env, port
        self._start_limit_s, self._progress = start_limit_s, progress
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> ServerProcess:
        port = free_port() if self._port is None else self._port
        _refuse_taken(port)
        self.url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        place = ("--host", "127.0.0.1", "--port", str(port))
        with self.log.open("wb") as log:
            # In a session of its own: one signal then reaches all of its processes.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *self.arguments, *place],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process of the server at once: told politely, it takes the end of its children
        for a crash and looks into that for seconds."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_until_healthy(self) -> float:
        """Return how many seconds that took. Raises ServerError if the server ends before, or takes
        more than start_limit_s."""
        start = told = time.monotonic()
        while True:
            self.check_alive("before it was healthy")
            with contextlib.suppress(urllib.error.URLError, OSError):
                _request(f"{self.url}/health")
                return time.monotonic() - start
            now = time.monotonic()
            if now - start > self._start_limit_s:
                raise self.error(f"was not healthy after {self._start_limit_s:g} s")
            if now - told > _TELL_EVERY_S:
                told = now
                self._progress(f"  still starting after {now - start:.0f} s ({self.log})")
            time.sleep(_POLL_S)

    def check_alive(self, when: str = "while it was in use") -> None:
        """Raises ServerError if the server has ended."""
        if self._process.poll() is not None:
            raise self.error(f"ended with status {self._process.returncode} {when}")

    def counters(self) -> Counters:
        """Read /metrics as {(name, sorted labels): value}. Raises ServerError."""
        return parse_metrics(self._ask("/metrics"))

    def flush_cache(self) -> None:
        """Empty the radix cache; waits for running requests to end. Raises ServerError."""
        self._ask(f"/flush_cache?timeout={_FLUSH_LIMIT_S:g}", method="POST", limit_s=90)

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def error(self, what: str) -> ServerError:
        """Make an error that says `what` of this server and ends with its log."""
        return ServerError(f"the SGLang server {what} ({self.log})", self.log_tail())

    def _ask(self, path: str, **request) -> str:
        try:
            return _request(self.url + path, **request)
        except OSError as error:
            self.check_alive(f"before it answered {path}")
            raise self.error(f"did not answer {path}: {error}") from None


def backend_server(
    backend: str,
    model: Path,
    folder: Path,
    *,
    arguments: Sequence[str] = (),
    on_cpu: bool = False,
    **process,
) -> ServerProcess:
    """Make the server of a backend, named as bench_engine names them or `default`.

    folder     a new one is made in it, with the log and what the server's search path needs
    arguments  of sglang.launch_server beside those that the backend and the model are
    on_cpu     the server runs on the platform that the plugin brings, in float32
    process    port, start_limit_s and progress of ServerProcess

    A backend that is not ours loads no plugin of ours, but on a CPU.
    """
    home = folder / folder_name(backend)
    home.mkdir(parents=True)
    plugins = plugin_names(product=names_prefix(backend) or on_cpu, evaluation=False)
    base = os.environ | backend_env(backend) | (CPU_ENV if on_cpu else {})
    return ServerProcess(
        [
            *("--model-path", str(model)),
            *backend_flags(backend),
            *(("--device", "cpu", "--dtype", "float32") if on_cpu else ()),
            *arguments,
        ],
        log=home / "server.log",
        env=environment(base, make_site(home / "site", None), plugins, on_cpu=on_cpu),
        **process,
    )


def backend_flags(backend: str) -> list[str]:
    """Return the server's flags of a backend name; none for `default`."""
    if backend == DEFAULT:
        return []
    flags = backend_arguments(backend).items()
    return [word for key, value in flags for word in ("--" + key.replace("_", "-"), value)]


def parse_metrics(text: str) -> Counters:
    """Return samples of the Prometheus text format as {(name, sorted labels): value}."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def growth(before: Counters, after: Counters) -> Counters:
    """Return what each sample grew by; one that was not there before began at 0."""
    return {key: value - before.get(key, 0) for key, value in after.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _refuse_taken(port: int) -> None:
    """Raises ServerError: another server there would be measured in this one's place."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerError(f"port {port} is not free: {error.strerror}", "") from None


def _request(url: str, *, method: str = "GET", limit_s: float = 10.0) -> str:
    request = urllib.request.Request(url, method=method)
    with urllib.request.urlopen(request, timeout=limit_s) as response:
        return response.read().decode()
