"""How far two attention outputs may differ in check mode."""

import pytest
import torch

from sgl_prefix_attn.engine.cross_check import check_layer, layer_mismatch
from sgl_prefix_attn.metrics.counters import StepCounters

# Share of the largest output that rounding may explain.
ALLOWED = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_a_row_that_differs_by_more_than_rounding_is_named(dtype):
    expected = torch.ones(3, 8, dtype=dtype)
    expected[0, 0] = 4.0
    for share, difference in ((0.5, None), (2.0, "row 1 by "), (float("nan"), "row 1 by nan")):
        out = expected.clone()
        out[1, 2] += 4.0 * share * ALLOWED[dtype]
        found = layer_mismatch(out, expected)
        assert found is None if difference is None else found.startswith(difference), share


def test_a_mismatch_is_counted_and_logged_once(caplog):
    counters, expected = StepCounters(), torch.ones(2, 8)
    for out in (expected, expected + 1, expected * float("nan")):
        check_layer(5, out, expected, counters)
    assert counters.mismatches == 2
    assert caplog.text.count("layer 5: prefix and stock attention differ: row 0 by 1") == 1
