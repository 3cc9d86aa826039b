"""Beam searches, whose beams have rows in a batch and no requests."""

import importlib.util

import pytest

from tests.sglang.engine import STOCK, Config, plain

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang.srt.beam_search") is None,
        reason="this SGLang searches no beams",
    ),
]

KEY = ("beams", "")
BEAMS = Config("beams", plain("beams"))


def test_beams_equal_those_of_stock_attention(engines):
    prefix, stock = engines.run(BEAMS), engines.run(BEAMS, STOCK)
    assert len(prefix.outputs[KEY]) == 6 and all(prefix.outputs[KEY])
    assert prefix.outputs[KEY] == stock.outputs[KEY]


def test_steps_without_beams_run_plans(engines):
    steps = engines.run(BEAMS).steps[KEY]
    found = {(step["variant"], step["reason"]) for step in steps}
    assert found == {("stock", "beam_search"), ("prefix", "default")}
