"""The torch executor on poisoned memory = full attention in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.records import STRATEGIES, HeadConfig, PlanTooLarge
from tests.support.examples import examples
from tests.support.forests import path_table, path_tables, planner, random_paths
from tests.support.problems import assert_attention, make_problem, plain_attention
from tests.support.running import append, load, loaded, run

HEADS = [
    HeadConfig(1, 1, 32), HeadConfig(7, 1, 32), HeadConfig(28, 4, 64), HeadConfig(40, 8, 80),
    HeadConfig(8, 4, 96), HeadConfig(16, 1, 128), HeadConfig(12, 4, 256),
    HeadConfig(16, 1, 576, 512), HeadConfig(20, 1, 40, 32),
]  # fmt: skip
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(problem, plan, grown=0):
    made = loaded(problem, plan)
    assert_attention(problem, *run(made, problem))
    generator = torch.Generator().manual_seed(7)
    for _ in range(grown):
        append(made, problem, problem.grow(generator))
    if grown:
        assert_attention(problem, *run(made, problem))


@given(
    path_tables(),
    st.sampled_from(HEADS),
    st.sampled_from(DTYPES),
    st.sampled_from(STRATEGIES),
    st.sampled_from([0.0, 0.0, 5.0]),
    st.integers(0, 99),
)
@examples(60)
def test_executor_is_full_attention(paths, heads, dtype, strategy, soft_cap, seed):
    problem = make_problem(paths, heads, dtype, soft_cap=soft_cap, seed=seed)
    check(problem, planner(heads, strategy).plan(paths), grown=seed % 3)


@pytest.mark.parametrize(
    ("paths", "dtype", "strategy"),
    [
        *((random_paths(b, b, 24), torch.float16, s)
          for b in (37, 113) for s in ("pat", "calibrated")),
        *((path_table([(-1, 4097), (0, 63)], [1, 1, 0, -1], [1, 63, 4097, 1]), dtype, "naive")
          for dtype in DTYPES),
    ],
)  # fmt: skip
def test_large_batches_and_long_sequences(paths, dtype, strategy):
    heads = HeadConfig(8, 2, 64)
    check(make_problem(paths, heads, dtype), planner(heads, strategy).plan(paths), grown=2)


def test_grows_to_the_last_token_of_the_headroom():
    heads = HeadConfig(8, 2, 32)
    paths = path_table([(-1, 64)], [0, 0, -1], [15, 16, 1])
    for headroom in (1, 20):
        plan = planner(heads, "naive", headroom=headroom).plan(paths)
        check(make_problem(paths, heads), plan, grown=headroom)


def test_a_plan_that_is_too_large_leaves_the_current_one():
    heads = HeadConfig(8, 2, 32)
    small, large = random_paths(1, 3, 4), random_paths(2, 30, 20)
    problem = make_problem(small, heads)
    plan = planner(heads, "naive").plan(small)
    made = loaded(problem, plan)
    other = make_problem(large, heads)
    too_large = planner(heads, "naive").plan(large)
    capacity = Capacity.for_plans(too_large)
    for name in ("words", "index_slots", "partials"):
        made.capacity = replace(capacity, **{name: getattr(capacity, name) - 1})
        with pytest.raises(PlanTooLarge, match="plan needs"):
            made.load(too_large, other.req_to_token, other.pool)
        assert made.plan is plan
    assert_attention(problem, *run(made, problem))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (W.H_TILE_ROWS, "tiles have"),
        (W.H_PART_TOKENS, "parts have"),
    ],
)
def test_a_plan_for_other_kernels_leaves_the_current_one(word, message):
    heads = HeadConfig(8, 2, 32)
    problem = make_problem(random_paths(2, 30, 20), heads)
    plan, other = (planner(heads, "naive").plan(problem.paths) for _ in range(2))
    made = loaded(problem, plan)
    other.words[word] += 1
    other.words[W.H_NUM_ITEMS] = 0
    with pytest.raises(ValueError, match=message):
        load(made, problem, other)
    assert made.plan is plan
    assert_attention(problem, *run(made, problem))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_ground_truth_is_plain_attention(dtype, soft_cap):
    """full_attention against this suite's own formulation."""
    paths = random_paths(4, 7, 6)
    problem = make_problem(paths, HEADS[2], torch.float16, soft_cap=soft_cap)
    out, lse = full_attention(
        problem.q, problem.k, problem.v, problem.req_to_token, problem.pool, problem.seq_lens,
        sm_scale=problem.sm_scale, logits_soft_cap=soft_cap, dtype=dtype,
    )  # fmt: skip
    want, want_lse = plain_attention(problem, torch.float64)
    if soft_cap:  # else the tests with a cap would prove nothing
        uncapped, _ = plain_attention(replace(problem, soft_cap=0.0), torch.float64)
        assert (uncapped - want).abs().max() > 0.05
    assert out.dtype == dtype and lse.base == "2"
    # logits up to 2**3, weights and values near 1: a few roundings of each
    atol = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(lse.values.double(), want_lse, rtol=0, atol=atol)
