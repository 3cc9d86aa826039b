"""eval.demo.near_ties: outputs may differ by noise, and by nothing worse."""

import math
from types import SimpleNamespace

import pytest

from eval.demo.near_ties import differ, verdict


def output(tokens, gap=1.0, shift=0.0):
    """A request's output whose best log-probability is -0.5 + shift at every step."""
    top = [[(token, -0.5 + shift), (999, -0.5 + shift - gap)] for token in tokens]
    return SimpleNamespace(token_ids=tokens, top=top)


def test_difference_stops_at_the_first_token_that_differs():
    a = [output([1, 2, 3, 4]), output([5, 6, 7, 8])]
    b = [output([1, 2, 9, 9], gap=0.25, shift=0.125), output([5, 6, 7, 8])]
    difference = differ(a, b)
    assert difference.equal_share == pytest.approx(6 / 8)
    assert difference.max_gap == pytest.approx(1.0)
    assert differ([a[0]], [output([1, 2, 9, 9], gap=1.5)]).max_gap == pytest.approx(1.5)
    assert difference.max_logprob_error == pytest.approx(0.125)


@pytest.mark.parametrize("b", [[], [output([1])], [output([1, 2]), output([3, 4])]])
def test_other_requests_are_no_comparison(b):
    with pytest.raises(ValueError):
        differ([output([1, 2])], b)


def near_tie(diverged, of=20):
    """Outputs of `of` requests, the first `diverged` of which part at a near-tie."""
    return [output([1, 2, 7 if i < diverged else 3, 4], gap=0.02, shift=0.004) for i in range(of)]


FIRST_19 = near_tie(2)[:-1]


@pytest.mark.parametrize(
    ("tested", "problem"),
    [
        (near_tie(3), None),
        (near_tie(18), "equal tokens"),
        (FIRST_19 + [output([1, 8, 8, 8], gap=2.0)], "top-2 gap of 2.000"),
        (FIRST_19 + [output([1, 2, 3, 4], 0.02, 0.1)], "log-probability error 0.1000"),
        (FIRST_19 + [output([1, 2, 3, 4], 0.02, math.nan)], "log-probability error nan"),
        (FIRST_19 + [output([1, 8, 8, 8], gap=math.nan)], "top-2 gap of nan"),
    ],
)
def test_verdict_allows_noise_and_nothing_worse(tested, problem):
    stock = [output([1, 2, 3, 4], gap=0.02) for _ in range(20)]
    found = verdict(differ(stock, tested), differ(stock, near_tie(2)))
    assert len(found) == (problem is not None) and all(problem in text for text in found)
