"""An evaluation in a process of its own, whose servers end with it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_evaluation(name: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m eval.<name>`; stderr follows in the result's stdout. Whatever interrupts this,
    such as the time limit of a test, lets it end its servers: a killed one would leave them."""
    with subprocess.Popen(
        [sys.executable, "-m", f"eval.{name}", *arguments], cwd=ROOT, env=os.environ | env,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate()
        except BaseException:
            process.terminate()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, printed)
