"""Runs tests/cpu/interpreted_kernels.py with TRITON_INTERPRET=1, in a process of its own.

The variable must be set before the kernels are imported, and every other test in this process must
find them as they are.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("interpreted_kernels.py")


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    root = str(TESTS.parents[2])
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root])),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(
        command, cwd=root, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(done.stdout)
    assert done.returncode == 0, "see the output of the interpreted tests above"
