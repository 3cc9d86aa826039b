"""Runs tests/support/interpreted_slots.py in Triton's interpreter."""

from tests.support.interpreter_process import run_interpreted


def test_slots_in_the_interpreter():
    run_interpreted("interpreted_slots.py")
