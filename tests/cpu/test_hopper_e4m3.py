"""The row-tile kernel's own source over a KV cache of float8_e4m3fn, emulated on a CPU as in
test_hopper_kernel.py."""

from __future__ import annotations

import pytest
import torch

from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.kernels.hopper import e4m3_blocks
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.cpu.test_hopper_kernel import (
    BITS,
    CTAS,
    RANGES,
    attend,
    check_growth,
    plans_of,
    problem_of,
)
from tests.support import emulated_gluon
from tests.support.forests import path_table
from tests.support.poison import POISONS, assert_contained, forest, poisoned
from tests.support.problems import E4M3, assert_attention
from tests.support.sinks import sinks_of

WIDE = HeadConfig(6, 2, 256)  # whose queries stay in shared memory, as two terms
HEADS = (BITS, RANGES, HeadConfig(7, 1, 128), HeadConfig(16, 1, 128), WIDE)
SOME_SLOW = (BITS, *(pytest.param(heads, marks=pytest.mark.slow) for heads in HEADS[1:]))


def narrow(heads, paths=None, **options):
    return problem_of(heads, paths, kv_dtype=E4M3, **options)


@pytest.mark.parametrize("soft_cap", [0.0, pytest.param(20.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("heads", SOME_SLOW, ids=str)
def test_tiny_plans_are_full_attention(heads, soft_cap):
    problem = narrow(heads, soft_cap=soft_cap)
    if heads in (BITS, HEADS[2]):
        problem.sinks = sinks_of(heads)
    for plan in plans_of(problem):
        assert_attention(problem, *attend(problem, plan))


@pytest.mark.long
def test_rows_of_queries_of_any_size():
    """Each has units of its own: a request beside one of enormous queries loses nothing."""
    problem = narrow(BITS)
    sizes = torch.tensor([1e20, 1e-20, 1.0, 1e-3, 1e3, 1e-20, 1e20, 1.0, 1e6])
    scaled = (problem.q.float() * sizes[:, None, None]).to(problem.q)
    plain, faint = (problem.of_rows([2, 7]), problem.of_rows([1, 5]))
    for plan in plans_of(problem):
        problem.q = scaled
        out, _ = attend(problem, plan)
        assert_attention(plain, out[[2, 7]])
        faint.q = scaled[[1, 5]]
        assert_attention(faint, out[[1, 5]])


@pytest.mark.long
def test_growth():
    check_growth(narrow(RANGES))


@pytest.mark.long
@pytest.mark.parametrize("heads", (*HEADS[:3], WIDE), ids=str)
@pytest.mark.parametrize("name", ["private V", "private K", "K of the root"])
def test_a_nan_stays_with_its_requests(name, heads):
    problem = narrow(heads)
    bad = poisoned(problem, POISONS[name])
    for plan in plans_of(problem):
        assert_contained(problem, bad, *attend(bad, plan))


def terms_of(x, text):
    """Both terms of float32 [n], with their signed zeros as zeros."""
    return [term.float() + 0.0 for term in emulated_gluon.two_terms(text, x)]


def check_terms(text):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = every[every.abs() < 256]
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]  # four unlike ones
    high = x.to(torch.float8_e4m3fn).float()
    low = (x - high).to(torch.float8_e4m3fn).float()
    assert all(map(torch.equal, terms_of(x, text), (high + 0.0, low + 0.0)))
    assert all(term.isnan().all() for term in terms_of(torch.full((4,), torch.nan), text))


def test_terms_of_every_bfloat16_in_range():
    check_terms(e4m3_blocks.TWO_TERMS.value)


# --- what must be found ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("x, $3, $2", "x, $2, $3"),
        ("$1, {a, b}", "$1, {b, a}"),
        ("w, b", "w, a"),
        ("y, y, w", "y, y, x"),
    ],
)
def test_wrong_terms_are_found(right, wrong):
    text = e4m3_blocks.TWO_TERMS.value
    assert text.count(right) == 1
    with pytest.raises(AssertionError):
        check_terms(text.replace(right, wrong))


SCORES = {
    "queries of one term": (
        "consume", "s = warpgroup_mma(low, k, z, use_acc=False, is_async=True)", "s = z",
    ),
    "scores in other units": ("two_terms", "gl.convert_layout(unit, ROWS)", "unit * 2"),
    "queries of one term, twice": (
        "terms_in_place", "terms.index(1).store(low)", "terms.index(1).store(high)",
    ),
    "values without their scale": ("consume", "acc = acc * v_scale", "acc = acc"),
    "values of the block before": (
        "convert", "rings.kv.index(2 * stage).slice", "rings.kv.index(0).slice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("heads", [RANGES, WIDE], ids=str)
@pytest.mark.parametrize("fault", SCORES)
def test_wrong_products_are_found(fault, heads):
    if SCORES[fault][0] == "terms_in_place" and heads != WIDE:
        pytest.skip("queries are in registers")
    problem = narrow(heads)
    plan = plans_of(problem)[0]
    with pytest.raises(AssertionError):
        assert_attention(problem, *attend(problem, plan, [SCORES[fault]]))


def late(where: str, what: str) -> tuple[str, str, str]:
    return where, what, f"__import__('time').sleep(0.1); {what}"


# What is not waited for, and who is late.
NOT_WAITED_FOR = {
    "products of the keys before": [
        ("copy_block", "mbarrier.wait(rings.k_free", "(lambda *_: None)(rings.k_free"),
        late("consume", "s = warpgroup_mma_wait(1"),
    ],
    "products of the values before": [
        ("convert", "mbarrier.wait(", "(lambda *_: None)("),
        late("begin_values", "return warpgroup_mma("),
    ],
    "converted values": [
        ("begin_values", "mbarrier.wait(", "(lambda *_: None)("),
        late("convert", "mbarrier.wait("),
        # which would mend it: rings begin as NaN here
        ("consume", "must_run_again(rings, 4) != 0", "False"),
        ("produce", "must_run_again(rings, S.PRODUCER_WARPS) != 0", "False"),
    ],
    "the conversion of values that copies overwrite": [
        ("convert_late", "pending > MOST", "pending > S.STAGES"),
        ("convert_late", "convert(MOST", "convert(S.STAGES"),
    ],
}
NOT_WAITED_FOR |= {
    f"{what}, head dim 256": [
        tuple(part.replace("warpgroup_mma_wait(1", "warpgroup_mma_wait(0") for part in fault)
        for fault in faults
    ]
    for what, faults in NOT_WAITED_FOR.items()
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", NOT_WAITED_FOR)
def test_what_must_be_waited_for_is(what, monkeypatch):
    """Of tiles of two warpgroups that take their turns, one of which is late."""
    monkeypatch.setattr(emulated_gluon, "LONGEST_WAIT_S", 3)  # some turns then never come
    problem = narrow(WIDE if "256" in what else RANGES)
    plan = plans_of(problem)[0]
    with pytest.raises(AssertionError):
        assert_attention(problem, *attend(problem, plan, NOT_WAITED_FOR[what]))


CLEANING = {
    "keys are left": ("clean", "finite[:, None], b_k, nan", "finite[:, None], b_k, b_k"),
    "values are left": ("clean", "b_v, gl.zeros_like(b_v)", "b_v, b_v"),
    "values are those of the first run": (
        "produce_cleaned", "clean(k, v, values_of(rings, stage, S), S)", "clean(k, v, v, S)",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("heads", [RANGES, WIDE], ids=str)
@pytest.mark.parametrize("fault", CLEANING)
def test_a_fault_of_the_second_run_is_found(fault, heads):
    problem = narrow(heads)
    bad = poisoned(problem, POISONS["private V"])
    plan = plans_of(problem)[-1]
    assert_contained(problem, bad, *attend(bad, plan))
    with pytest.raises(AssertionError):
        assert_contained(problem, bad, *attend(bad, plan, [CLEANING[fault]]))


WAITS = {
    "queries before the blocks of items before": [
        ("convert_late", "pending > MOST", "pending > MOST + 1"),
        ("convert_late", "wait_group(MOST)", "wait_group(MOST + 1)"),
        ("convert_late", "convert(MOST", "convert(MOST + 1"),
    ],
    "blocks that are never passed on": [("convert_rest", "while pending > 0", "while pending > 1")],
    "values that wait for their own place": [
        ("convert", "gl.where(wraps, phase, phase ^ 1)", "gl.where(wraps, phase ^ 1, phase)"),
    ],
}  # fmt: skip


# tiles of one block each, several a CTA
SHORT = path_table([], [-1] * 80, [5] * 80)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_many_short_items(head_dim):
    problem = narrow(HeadConfig(16, 1, head_dim), SHORT)
    plan = Planner(problem.heads, num_sms=CTAS, headroom=3).plan(SHORT)
    assert int(plan.words[W.H_NUM_ITEMS]) >= 3 * CTAS
    assert_attention(problem, *attend(problem, plan))
    if head_dim == 256:  # whose queries must stay until their item ends
        early = ("copy_queries", "mbarrier.wait(rings.q_free", "(lambda *_: None)(rings.q_free")
        with pytest.raises(AssertionError):
            assert_attention(problem, *attend(problem, plan, [early]))


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("fault", WAITS)
def test_a_producer_that_waits_for_itself_is_found(fault, head_dim, monkeypatch):
    monkeypatch.setattr(emulated_gluon, "LONGEST_WAIT_S", 3)
    short = fault == "queries before the blocks of items before"
    problem = narrow(HeadConfig(16, 1, head_dim), SHORT if short else forest(1500))
    plan = Planner(problem.heads, num_sms=CTAS, headroom=3).plan(problem.paths)
    with pytest.raises(AssertionError, match="never passed"):
        attend(problem, plan, WAITS[fault])
