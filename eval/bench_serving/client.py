"""Runs of SGLang's benchmark client against a server, in a process group of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import select
import signal
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from eval.engine_process import make_site
from eval.server_process import LOG_TAIL_LINES, ServerProcess
from eval.workloads import load as loads
from eval.workloads.load import Load

# SGLang's client imports the package for a dataset that no load uses.
_DATASETS = '''"""Stands in for Hugging Face's datasets package, which is not installed here."""


def load_dataset(*_, **__):
    raise ImportError("this dataset of SGLang's client needs: pip install datasets")
'''
_POLL_S = 0.2


class ClientError(RuntimeError):
    """The client failed, or every request; the message ends with the log or the first error."""


class Client:
    """Context manager: sends loads, one at a time, through SGLang's client.

    model   folder with config and tokenizer; vocab_size: its words
    folder  for request files, logs and results, one of each run; it is made

    Runs are forked from one process, which is started at the beginning and ended with the block.
    """

    def __init__(self, model: Path, vocab_size: int, folder: Path, seed: int):
        self.model, self.vocab_size, self.seed = model, vocab_size, seed
        self._folder = folder

    def __enter__(self) -> Client:
        self._environment = client_environment(self._folder / "home")
        self._start()
        return self

    def __exit__(self, *_) -> None:
        self._end()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eval.bench_serving.forked_runs"],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def _end(self) -> None:
        """End the process and the run that it may have forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def run(
        self, name: str, server: ServerProcess, load: Load, rate: float, streams: bool = True
    ) -> dict:
        """Send a load at a rate (1/s, inf: all at once) and return what the client reports.

        name     of the run, a new one
        streams  tokens are sent as they come; otherwise each answer when it is complete

        Raises ClientError; ServerError if the server ends meanwhile.
        """
        home = self._folder / name
        home.mkdir()
        report, log = home / "report.jsonl", home / "client.log"
        words = self.command(server.url, load, rate, report)
        words += [] if streams else ["--disable-stream"]
        status = self._status(words, log, lambda: server.check_alive(f"while {load.name} was sent"))
        if status or not report.exists():
            server.check_alive(f"while {load.name} was sent")
            tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise ClientError(f"SGLang's client ended with status {status}:\n" + "\n".join(tail))
        found = json.loads(report.read_bytes())  # not orjson: a rate may be Infinity
        if all(found["errors"]):
            raise ClientError(f"every request failed; the first: {found['errors'][0].strip()}")
        return found

    def _status(self, words: list[str], log: Path, check: Callable[[], object]) -> int:
        """Have a run forked and return its exit status, -1 if a signal ended it; `check` is called
        while it runs and may raise, which ends the run."""
        log.touch()
        if self._process.poll() is not None:
            self._start()
        line = json.dumps({"words": words, "log": str(log)}).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            while not select.select([self._process.stdout], [], [], _POLL_S)[0]:
                check()
            return int(self._process.stdout.readline() or -1)
        except BaseException:
            self._end()
            raise

    def command(self, url: str, load: Load, rate: float, report: Path) -> list[str]:
        """Return module and arguments of the client; a file of requests is written once for every
        load and rate."""
        module, dataset = "sglang.bench_serving", load.dataset
        if not dataset:
            path = self._folder / f"{load.name}-{rate:g}.jsonl".replace(":", "-")
            if not path.exists():
                loads.write(load, path, seed=self.seed, vocab_size=self.vocab_size, rate=rate)
            module = "eval.bench_serving.request_client"
            dataset = ("--dataset-name", "custom", "--dataset-path", str(path))
        return [
            module,
            *("--backend", "sglang", "--base-url", url),
            *("--model", str(self.model), "--tokenizer", str(self.model)),
            *dataset,
            *("--request-rate", f"{rate:g}" if math.isfinite(rate) else "inf"),
            *("--seed", str(self.seed), "--warmup-requests", "0", "--disable-tqdm"),
            *("--cache-report", "--output-details", "--output-file", str(report)),
        ]


def lacks_datasets() -> bool:
    """Tell whether the package that SGLang's client imports for MMMU is missing."""
    return importlib.util.find_spec("datasets") is None


def client_environment(home: Path) -> dict[str, str]:
    """Return this process's environment for a client: with eval, and a stand-in for `datasets`
    where it is missing, on its path, in a folder that is made in `home`.

    HOME is `home`: the client keeps generated prompts below it under a name that does not tell one
    tokenizer's from another's.
    """
    home.mkdir(parents=True, exist_ok=True)
    path = make_site(home / "site", None)
    if lacks_datasets():
        (path / "datasets.py").write_text(_DATASETS)
    earlier = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "HOME": str(home),
        "PYTHONUSERBASE": site.getuserbase(),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(path), earlier])),
    }
