"""One SGLang HTTP server as a child process: start, wait until healthy, read counters, stop."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

START_LIMIT_S = 600
LOG_TAIL_LINES = 30

CPU_ARGUMENTS = ("--device=cpu", "--dtype=float32", "--max-total-tokens=16384")
GPU_ARGUMENTS = ("--dtype=bfloat16", "--max-total-tokens=65536")


class ServerError(RuntimeError):
    """The server did not start: one sentence, and the end of its log."""

    def __init__(self, sentence: str, log_tail: str):
        super().__init__(sentence)
        self.log_tail = log_tail


class Server:
    """Context manager: the server is starting inside, and stopped at the end.

    `url` answers after `wait_until_healthy`; `progress(text)` is told what that waits for.
    """

    def __init__(self, model: Path, backend: str, *, gpu: bool, workdir: Path, progress=print):
        self.backend = backend
        self.log = workdir / f"server-{backend}.log"
        self._model, self._gpu, self._workdir, self._progress = model, gpu, workdir, progress
        self._process = None
        self.url = ""

    def __enter__(self) -> "Server":
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._workdir.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(self._model.resolve())),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--attention-backend", self.backend),
            *("--enable-metrics", "--max-running-requests=16", "--random-seed=1"),
            *(GPU_ARGUMENTS if self._gpu else CPU_ARGUMENTS),
        ]
        # A model of this size is too small for the policy to choose prefix kernels on a GPU.
        env = {"SGL_PREFIX_ATTN_POLICY": "prefix", **os.environ}
        if not self._gpu:
            # One thread: more of them wait for each other longer than they compute.
            env |= {"SGL_PREFIX_ATTN_CPU_PLATFORM": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            # In a session of its own: one signal then reaches all of its processes.
            self._process = subprocess.Popen(
                command,
                env=env,
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

    def counters(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Read /metrics as {(name, sorted labels): value}."""
        return parse_metrics(_get(f"{self.url}/metrics"))

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def _error(self, what: str) -> ServerError:
        sentence = f"the SGLang server with --attention-backend {self.backend} {what} ({self.log})"
        return ServerError(sentence, self.log_tail())

    def wait_until_healthy(self) -> None:
        """Raises ServerError if it ends before, or takes more than START_LIMIT_S."""
        start = told = time.monotonic()
        while True:
            if self._process.poll() is not None:
                ended = f"ended with status {self._process.returncode} before it was healthy"
                raise self._error(ended)
            try:
                _get(f"{self.url}/health")
                return
            except (urllib.error.URLError, OSError):
                pass
            now = time.monotonic()
            if now - start > START_LIMIT_S:
                raise self._error(f"was not healthy after {START_LIMIT_S} s")
            if now - told > 10:
                told = now
                self._progress(f"  still starting after {now - start:.0f} s ({self.log})")
            time.sleep(0.5)


def parse_metrics(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return samples of the Prometheus text format as {(name, sorted labels): value}."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
