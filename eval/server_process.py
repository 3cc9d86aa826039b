"""One SGLang HTTP server as a child process: start, wait until healthy, read counters, stop.

Every process of a server is ended when its `with` block is left, by whatever exception
(engine_process.end_on_sigterm makes one of SIGTERM).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from eval.counters import Counters, parse_metrics
from eval.engine_process import (
    backend_arguments,
    backend_env,
    end_group,
    environment,
    folder_name,
    log_tail,
    make_site,
    names_prefix,
    plugin_names,
    start_session,
)

DEFAULT = "default"  # the attention backend that SGLang picks
_CPU_ARGUMENTS = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "32768")
_POLL_S, _TELL_EVERY_S = 0.5, 10.0
_ANSWER_LIMIT_S, _FLUSH_LIMIT_S = 60.0, 60.0


class ServerError(RuntimeError):
    """The server did not start or ended; the message ends with its log."""


class ServerProcess:
    """Context manager: the server is starting inside, and all of its processes end with it.

    arguments      of `module` but for --host and --port
    log            file for its output; its folder is made
    env            its whole environment; None: this process's
    start_limit_s  wait_until_healthy waits so long
    """

    module = "sglang.launch_server"

    def __init__(
        self, arguments: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None,
        start_limit_s: float = 900.0,
    ):  # fmt: skip
        self.log = log
        self.url = ""
        self.arguments, self.env = list(arguments), env
        self._start_limit_s = start_limit_s
        self._read = 0  # bytes of the log
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> ServerProcess:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        place = ("--host", "127.0.0.1", "--port", str(port))
        words = [self.module, *self.arguments, *place]
        self._process = start_session(words, self.log, self.env)
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process of the server at once: told politely, it takes the end of its children
        for a crash and looks into that for seconds."""
        end_group(self._process)

    def wait_until_healthy(self) -> float:
        """Return how many seconds that took. Raises ServerError if the server ends before, or takes
        more than start_limit_s."""
        start = told = time.monotonic()
        while True:
            self.check_alive("before it was healthy")
            with contextlib.suppress(OSError):
                if self.is_healthy():
                    return time.monotonic() - start
            now = time.monotonic()
            if now - start > self._start_limit_s:
                raise self.error(f"was not healthy after {self._start_limit_s:g} s")
            if now - told > _TELL_EVERY_S:
                told = now
                print(f"  still starting after {now - start:.0f} s ({self.log})", flush=True)
            time.sleep(_POLL_S)

    def is_healthy(self) -> bool:
        """Ask the server. Raises OSError where it says no or nothing."""
        fetch(f"{self.url}/health")
        return True

    def check_alive(self, when: str = "while it was in use") -> None:
        """Raises ServerError if the server has ended."""
        if self._process.poll() is not None:
            raise self.error(f"ended with status {self._process.returncode} {when}")

    def new_log(self) -> str:
        """Return what the server has written since the last call."""
        with self.log.open("rb") as log:
            log.seek(self._read)
            written = log.read()
        self._read += len(written)
        return written.decode(errors="replace")

    def counters(self) -> Counters:
        """Read /metrics as {(name, sorted labels): value}. Raises ServerError."""
        return parse_metrics(self._ask("/metrics"))

    def cpu_seconds(self) -> Counter[str]:
        """Return the CPU seconds that the server's processes have taken so far: `http`, the first
        one, which also tokenizes and streams, and the others by the names that they give
        themselves. Raises ServerError."""
        self.check_alive()
        found: Counter[str] = Counter()
        http = psutil.Process(self._process.pid)
        for process in (http, *http.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                name = "http" if process is http else process.cmdline()[0].strip()
                times = process.cpu_times()
                found[name] += times.user + times.system
        return found

    def flush_cache(self) -> None:
        """Empty the radix cache; waits for running requests to end. Raises ServerError."""
        self._ask(f"/flush_cache?timeout={_FLUSH_LIMIT_S:g}", method="POST", limit_s=90)

    def error(self, what: str) -> ServerError:
        """Make an error that says `what` of this server and ends with its log."""
        return ServerError(f"the SGLang server {what} ({self.log}):\n{log_tail(self.log)}")

    def _ask(self, path: str, limit_s: float = _ANSWER_LIMIT_S, **request) -> str:
        try:
            return fetch(self.url + path, limit_s=limit_s, **request)
        except OSError as error:
            self.check_alive(f"before it answered {path}")
            raise self.error(f"did not answer {path}: {error}") from None


def random_server(
    backend: str, model: Path, folder: Path, max_running: int, *more: str, on_cpu: bool
) -> ServerProcess:
    """Make the server of a backend, named as bench_engine names them or `default`, whose weights
    are random.

    folder  a new one is made in it, with the log and what the server's search path needs
    more    arguments of sglang.launch_server
    on_cpu  the server runs on the platform that the plugin brings, in float32

    A backend that is not ours loads no plugin of ours, but on a CPU.
    """
    print(f"starting {backend}", flush=True)
    home = folder / folder_name(backend)
    home.mkdir(parents=True)
    plugins = plugin_names(product=names_prefix(backend) or on_cpu, evaluation=False)
    base = os.environ | backend_env(backend)
    return ServerProcess(
        [
            *("--model-path", str(model)),
            *backend_flags(backend),
            *("--load-format", "dummy", "--random-seed", "1", "--enable-metrics"),
            *("--max-running-requests", str(max_running)),
            *(_CPU_ARGUMENTS if on_cpu else ()),
            *more,
        ],
        log=home / "server.log",
        env=environment(base, make_site(home / "site", None), plugins, on_cpu=on_cpu),
    )


def backend_flags(backend: str) -> list[str]:
    """Return the server's flags of a backend name; none for `default`."""
    if backend == DEFAULT:
        return []
    flags = backend_arguments(backend).items()
    return [word for key, value in flags for word in ("--" + key.replace("_", "-"), value)]


def free_port() -> int:
    """Find a port below those that systems hand out, which would give it to another process until
    the server binds it; not from a sequence that another process may have begun with the same seed.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def fetch(url: str, *, body: dict | None = None, method: str = "GET", limit_s: float = 10.0) -> str:
    """Return what a server answers; `body` is posted as JSON. Raises OSError."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    method = method if body is None else "POST"
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=limit_s) as response:
        return response.read().decode()
