"""Runs tests/support/interpreted_portable.py in Triton's interpreter."""

import pytest

from tests.support.interpreter_process import run_interpreted


@pytest.mark.long
@pytest.mark.parametrize("part", ["sink", "not sink"])  # together they take minutes
def test_the_portable_kernel_in_the_interpreter(part):
    run_interpreted("interpreted_portable.py", "-k", part)
