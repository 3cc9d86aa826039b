"""One run of SGLang's benchmark client against a server, in a process group of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import site
import subprocess
import sys
import time
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Client:
    """What every run of the client shares.

    model   folder with config and tokenizer; vocab_size: its words
    folder  for request files, logs and results, one of each run
    """

    model: Path
    vocab_size: int
    folder: Path
    seed: int

    def run(self, name: str, server: ServerProcess, load: Load, rate: float) -> dict:
        """Send a load at a rate (1/s, inf: all at once) and return what the client reports.

        name  of the run, a new one. Raises ClientError; ServerError if the server ends meanwhile.
        """
        home = self.folder / name
        home.mkdir(parents=True)
        report, log_path = home / "report.jsonl", home / "client.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *self.command(home, server.url, load, rate, report)],
                env=client_environment(home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while process.poll() is None:
                    server.check_alive(f"while {load.name} was sent")
                    time.sleep(_POLL_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode or not report.exists():
            server.check_alive(f"while {load.name} was sent")
            tail = log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise ClientError(
                f"SGLang's client ended with status {process.returncode}:\n" + "\n".join(tail)
            )
        found = json.loads(report.read_bytes())  # not orjson: a rate may be Infinity
        if all(found["errors"]):
            raise ClientError(f"every request failed; the first: {found['errors'][0].strip()}")
        return found

    def command(self, home: Path, url: str, load: Load, rate: float, report: Path) -> list[str]:
        """Return module and arguments of the client; a file of requests is written into `home`."""
        module, dataset = "sglang.bench_serving", load.dataset
        if not dataset:
            path = loads.write(
                load, home / "requests.jsonl", seed=self.seed, vocab_size=self.vocab_size, rate=rate
            )
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

    HOME is a new one: the client keeps generated prompts below it under a name that does not tell
    one tokenizer's from another's.
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
