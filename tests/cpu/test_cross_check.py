"""What check mode counts and logs, and what rounding may explain."""

from types import SimpleNamespace

import pytest
import torch

from sgl_prefix_attn.engine.cross_check import check_layer
from sgl_prefix_attn.execute.rounding import why_wrong
from sgl_prefix_attn.metrics.counters import StepCounters

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def test_a_mismatch_is_counted_and_logged_once(caplog):
    layer = SimpleNamespace(layer_id=5, tp_q_head_num=2, v_head_dim=4)
    counters, expected = StepCounters(), torch.ones(2, 8)
    for out in (expected, expected + 1, expected * float("nan")):
        check_layer(layer, out, expected, counters)
    assert counters.mismatches == 2
    said = "layer 5: prefix and stock attention differ: row 0 is off by 1 of its norm"
    assert caplog.text.count("layer 5") == 1 and said in caplog.text


def outputs(dtype) -> torch.Tensor:
    """Three requests of two heads; those of the second one are a thousandth of the first's."""
    values = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[1] /= 1000
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_request_is_judged_by_its_own_norm(dtype):
    want = outputs(dtype)
    assert why_wrong(want, want) is None
    out = want.clone()
    out[1] = 0
    assert why_wrong(out, want).startswith("row 1 is off by 1 of its norm")
    out = want.clone()
    out[1, 0, 3] = float("nan")
    assert why_wrong(out, want).startswith("row 1 is off by nan")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_by_itself_may_be_a_little_further_off(dtype):
    """Of many heads, so that the one hardly counts among all."""
    want = outputs(torch.float64).repeat(1, 32, 1)
    one_head = torch.zeros(3, 64, 1, dtype=torch.float64)
    one_head[2, 40] = torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
    for share, of_low, found in ((0.9, 0.0, False), (1.1, 0.0, True), (1.8, 1.0, False)):
        out, low = want * (1 + share * one_head), want * (1 + of_low * one_head)
        # in float32 at least, so that nothing is rounded besides
        wrong = why_wrong(out.to(dtype), out.to(dtype).double() + (want - out), low)
        assert (wrong is not None) == found, share
        assert not found or wrong.startswith("row 2, head 40 is off by ")


def test_numbers_below_the_smallest_normal_one_are_rounded_like_it():
    want = torch.full((1, 1, 64), 3e-8, dtype=torch.float64)
    assert why_wrong(torch.full((1, 1, 64), 6e-8).half(), want, want) is None
    assert why_wrong(torch.full((1, 1, 64), 1e-5).half(), want, want) is not None


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"output is \[2, 1, 4\], expected \[3, 1, 4\]"):
        why_wrong(torch.ones(2, 1, 4), torch.ones(3, 1, 4))
