"""Runs tests/gpu/test_kernels.py in Triton's interpreter, in a process of its own: the variable
must be set before the kernels are imported, and other tests must find them as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/gpu/test_kernels.py"], cwd=ROOT, env=env, text=True, capture_output=True
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, "see the output of the interpreted tests above"
    assert " passed" in done.stdout
