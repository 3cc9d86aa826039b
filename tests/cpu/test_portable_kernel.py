"""Runs tests/support/interpreted_portable.py in Triton's interpreter."""

import pytest

from tests.support.interpreter_process import run_interpreted

PARTS = ["gqa4", "sink and not gqa4", "not sink and not gqa4"]  # the last two take minutes


@pytest.mark.parametrize(
    "part", [PARTS[0], *(pytest.param(part, marks=pytest.mark.long) for part in PARTS[1:])]
)
def test_the_portable_kernel_in_the_interpreter(part):
    run_interpreted("interpreted_portable.py", "-k", part)
