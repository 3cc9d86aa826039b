"""Runs of SGLang's benchmark client against a server, in a process group of their own."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import site
import time
from pathlib import Path

from eval.engine_process import end_group, log_tail, make_site, python_path, start_session
from eval.server_process import ServerProcess
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
    """Sends loads, one at a time, through SGLang's client.

    model   folder with config and tokenizer; vocab_size: its words
    folder  for request files, logs and results, one of each run; it is made
    """

    def __init__(self, model: Path, vocab_size: int, folder: Path, seed: int):
        self.model, self.vocab_size, self.seed = model, vocab_size, seed
        self._folder = folder
        self._environment = client_environment(folder / "home")

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
        process = start_session(words, log, self._environment)
        try:
            while process.poll() is None:
                server.check_alive(f"while {load.name} was sent")
                time.sleep(_POLL_S)
        finally:
            end_group(process)
        status = process.returncode
        if status or not report.exists():
            server.check_alive(f"while {load.name} was sent")
            raise ClientError(f"SGLang's client ended with status {status}:\n{log_tail(log)}")
        found = json.loads(report.read_bytes())  # not orjson: a rate may be Infinity
        if all(found["errors"]):
            raise ClientError(f"every request failed; the first: {found['errors'][0].strip()}")
        return found

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
            module, *("--backend", "sglang", "--base-url", url),
            *("--model", str(self.model), "--tokenizer", str(self.model)), *dataset,
            *("--request-rate", f"{rate:g}" if math.isfinite(rate) else "inf"),
            *("--seed", str(self.seed), "--warmup-requests", "0", "--disable-tqdm"),
            *("--cache-report", "--output-details", "--output-file", str(report)),
        ]  # fmt: skip


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
    return {
        **os.environ, "HOME": str(home), "PYTHONUSERBASE": site.getuserbase(),
        "PYTHONPATH": python_path(path, os.environ),
    }  # fmt: skip
