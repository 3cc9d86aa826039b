"""Runs of SGLang's client, each in a process forked from this one, which has imported it before.

    python -m eval.bench_serving.forked_runs

The import takes longer than many loads. A line of standard input is a run, as JSON: `words`, a
module and its arguments as after `python -m`, and `log`, the file for its output. Its exit status
is a line of standard output; -1 stands for one that a signal ended.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import warnings
from pathlib import Path

import orjson


def main() -> None:
    # The threads are those of numerical libraries, which nothing has called yet.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    # A release that has the client elsewhere imports it in every run.
    with contextlib.suppress(ImportError):
        import sglang.benchmark.serving  # noqa: F401
    for line in sys.stdin.buffer:
        run = orjson.loads(line)
        child = os.fork()
        if not child:
            _become(run["words"], Path(run["log"]))
        _, status = os.waitpid(child, 0)
        print(max(-1, os.waitstatus_to_exitcode(status)), flush=True)


def _become(words: list[str], log: Path) -> None:
    """Run a module as `python -m` does, and end this process with it."""
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.argv = words
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
