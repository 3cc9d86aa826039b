"""The inline assembly of the row-tile kernel's softmax, interpreted; a thread has two rows."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_prefix_attn.kernels.hopper import softmax
from tests.support.ptx import LANES, run_warp

SLACK = 8
GROW = softmax.GROW.value
GROW_BY_ROW = softmax.GROW_BY_ROW.value


def quads(values):
    """One value a row in the four lanes of its quad."""
    return np.repeat(np.asarray(values, np.float32), 4)


def grow(tops, maxima, text=GROW):
    """Maxima and factors of both rows of every thread."""
    outs = run_warp(text, 4, [*tops, *maxima])
    return outs[:2], outs[2:]


def random_rows(seed):
    rng = np.random.default_rng(seed)
    maxima = [quads(rng.normal(size=LANES // 4)) for _ in range(2)]
    tops = [m + rng.uniform(-20, 7.9, LANES).astype(np.float32) for m in maxima]
    return tops, maxima


@pytest.mark.parametrize("text", [GROW, GROW_BY_ROW])
def test_scores_within_the_slack_change_nothing(text):
    tops, maxima = random_rows(0)
    tops[1][:] = -np.inf  # masked
    new, factors = grow(tops, maxima, text)
    for row in range(2):
        assert np.array_equal(new[row], maxima[row]) and (factors[row] == 1).all()


def check_growth(text):
    for seed in range(40):
        tops, maxima = random_rows(seed)
        row, lane = seed % 2, seed * 5 % LANES
        tops[row][lane] = maxima[row][lane] + SLACK + 1
        new, factors = grow(tops, maxima, text)
        for r in range(2):
            over_quads = tops[r].reshape(-1, 4).max(1)
            want = np.fmax(maxima[r], quads(over_quads))
            assert np.array_equal(new[r], want)
            np.testing.assert_allclose(factors[r], np.exp2(maxima[r] - want))


def test_one_score_beyond_it_renews_the_maxima_of_its_warp():
    check_growth(GROW)


def check_growth_by_row(text):
    """Where some rows of a warp grow, the others stay as they are without them."""
    for seed in range(40):
        tops, maxima = random_rows(seed)
        for i in range(1 + seed % 3):
            tops[(seed + i) % 2][(seed * 5 + i * 11) % LANES] += 2 * SLACK * (i + 1)
        new, factors = grow(tops, maxima, text)
        for r in range(2):
            top = quads(tops[r].reshape(-1, 4).max(1))
            want = np.where(top > maxima[r] + np.float32(SLACK), top, maxima[r])
            assert np.array_equal(new[r], want)
            np.testing.assert_allclose(factors[r], np.exp2(maxima[r] - want))


def test_each_row_renews_its_own_maximum():
    check_growth_by_row(GROW_BY_ROW)
    with pytest.raises(AssertionError):
        check_growth_by_row(GROW)  # together with its warp's


@pytest.mark.parametrize("text", [GROW, GROW_BY_ROW])
def test_the_first_block_and_rows_that_see_nothing_yet(text):
    lowest = np.float32(-1e30)
    maxima = [quads(np.full(LANES // 4, lowest))] * 2
    tops = [np.full(LANES, -np.inf, np.float32), np.linspace(-3, 3, LANES, dtype=np.float32)]
    new, factors = grow(tops, maxima, text)
    assert (new[0] == lowest).all() and (factors[0] == 1).all()
    assert np.array_equal(new[1], quads(tops[1].reshape(-1, 4).max(1))) and (factors[1] == 0).all()


@pytest.mark.parametrize(
    "fault",
    [
        ("bfly.b32 a, $4, 1", "bfly.b32 a, $4, 4"),  # another quad's
        ("bfly.b32 b, b, 2", "bfly.b32 b, b, 1"),  # half of a quad
        ("or.f32 over, $5, b, over", "f32 over, $5, b"),  # the second row's score alone
        ("vote.sync.any.pred over, over, 0xffffffff;", ""),  # lanes go their own ways
        ("sub.f32 b, $7, $1", "sub.f32 b, $7, $0"),  # the other row's
    ],
)
def test_a_planted_fault_is_found(fault):
    assert fault[0] in GROW
    with pytest.raises(AssertionError):
        check_growth(GROW.replace(*fault))


@pytest.mark.parametrize(
    "fault",
    [
        ("bfly.b32 c, $4, 1", "bfly.b32 c, $4, 4"),  # another quad's
        ("bfly.b32 b, d, 2", "bfly.b32 b, d, 1"),  # half of a quad
        ("or.f32 over, $5, b, over", "f32 over, $5, b"),  # the second row's score alone
        ("setp.gt.f32 over, d, b;", ""),  # as the other row decides
        ("selp.f32 $0, c, $6, over", "max.f32 $0, c, $6"),  # wherever the warp grows
        ("sub.f32 b, $7, $1", "sub.f32 b, $7, $0"),  # the other row's
    ],
)
def test_a_planted_fault_of_single_rows_is_found(fault):
    assert fault[0] in GROW_BY_ROW
    with pytest.raises(AssertionError):
        check_growth_by_row(GROW_BY_ROW.replace(*fault))


@pytest.mark.parametrize("n", [32, 64, 128])
@pytest.mark.parametrize("row", [None, 0, 1])
def test_results_shrink_by_their_rows_factors(n, row):
    text, operands = softmax.shrunk_results(n)
    assert operands.split(",") == ["=&f"] * n + [str(i) for i in range(n)] + ["f"] * n
    rng = np.random.default_rng(n)
    results = [rng.normal(size=LANES).astype(np.float32) for _ in range(n)]
    factors = [np.ones(LANES, np.float32) for _ in range(2)]
    if row is not None:
        factors[row][9] = 0.25
    by_result = [factors[i // 2 % 2] for i in range(n)]
    outs = run_warp(text, n, [*results, *by_result], in_place=True)
    for out, result, factor in zip(outs, results, by_result, strict=True):
        assert np.array_equal(out, result * factor)
