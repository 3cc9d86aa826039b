"""Tests that Triton's interpreter runs, in a process of their own: TRITON_INTERPRET=1 must be set
before the kernels are imported, and other tests must find them as they are."""

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]


def run_interpreted(name: str, *chosen: str) -> None:
    """Run tests/support/<name>, `chosen` by pytest's arguments; AssertionError with its output
    where one fails."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
    }
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "-p", "tests.support.interpreter_calls", SUPPORT / name, *chosen,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
