"""The Triton kernels in Triton's interpreter; run by test_kernels_interpreted.py in a process of
its own, because TRITON_INTERPRET=1 must be set before the kernels are imported."""

import os

import pytest
import torch

from sgl_prefix_attn.execute.backends.triton_backend import TritonBackend
from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.plan import STRATEGIES
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table, planner, random_paths
from tests.support.problems import assert_attention, make_problem
from tests.support.running import PADDING, executor, planned_wrapper, run

assert os.environ.get("TRITON_INTERPRET") == "1"

HEADS = HeadConfig(8, 2, 32)  # up to 4 tails a tile
DTYPES = [torch.float32, torch.float16]  # bf16 products are wrong in the interpreter


def used_tiles(plan):
    return {t for t in range(L.MAX_TILES) if plan.words[L.H_QUEUES + 2 * t + 1]}


def check(problem, plan, made):
    made.load(plan, problem.req_to_token, problem.pool)
    compare(problem, plan, made)


def compare(problem, plan, made):
    """The kernels against float64 and, on the same words and kv_indices, the torch executor.

    The second bound is fixed: both sum in float32, and differ in the order of sums, in exp2 against
    exp, and in float16's rounding of probabilities and results (values up to about 4).
    """
    out, lse = run(made, problem)
    assert (made.workspace.tickets == 0).all(), "the next forward starts from ticket 0"
    assert_attention(problem, out, lse)
    oracle = executor(problem, plan)
    oracle.workspace.words[: plan.words.size] = made.workspace.words[: plan.words.size]
    kv_indices = oracle.workspace.kv_indices
    kv_indices[:] = made.workspace.kv_indices[: kv_indices.numel()]
    oracle.plan = plan
    want, want_lse = run(oracle, problem)
    atol = 4e-6 if problem.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out, want, rtol=0, atol=atol)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy, dtype):
    paths = random_paths(11, 9, 8, lengths=(1, 16, 33, 63))
    problem = make_problem(paths, HEADS, dtype)
    plan = planner(HEADS, strategy).plan(paths)
    check(problem, plan, executor(problem, plan, use_triton=True))


@pytest.mark.parametrize(
    "heads",
    [
        HeadConfig(1, 1, 16), HeadConfig(7, 1, 32), HeadConfig(28, 4, 32), HeadConfig(10, 2, 80),
        HeadConfig(4, 4, 96), HeadConfig(16, 1, 256), HeadConfig(6, 2, 128),
    ],
    ids=str,
)  # fmt: skip
def test_head_configurations(heads):
    paths = random_paths(3, 6, 5, lengths=(1, 17, 40))
    problem = make_problem(paths, heads, torch.float16)
    plan = planner(heads, "naive").plan(paths)
    check(problem, plan, executor(problem, plan, use_triton=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_every_tile_at_once(dtype, soft_cap):
    """Both shared tiles, several row tiles, single and packed tails of unlike lengths, splits,
    and requests that write to the output directly."""
    nodes = [(-1, 20), (-1, 31), (-1, 33), (-1, 64), (-1, 129)]
    leaf = [0] * 2 + [1] * 5 + [2] * 4 + [3] * 7 + [4] * 19 + [-1] * 5
    tails = [1 + (37 * i) % 64 for i in range(len(leaf) - 3)] + [150, 65, 1]
    paths = path_table(nodes, leaf, tails)
    problem = make_problem(paths, HEADS, dtype, soft_cap=soft_cap)
    plan = planner(HEADS, "naive").plan(paths)
    assert used_tiles(plan) == set(range(4))
    check(problem, plan, executor(problem, plan, use_triton=True))


@pytest.mark.parametrize("packed", [True, False])
def test_appends_without_a_new_plan(packed):
    paths = path_table([(-1, 40)], [0, 0, 0, -1, -1], [15, 16, 1, 63, 31])
    problem = make_problem(paths, HEADS, torch.float16)
    plan = planner(HEADS, "naive", headroom=18, packed=packed).plan(paths)
    made = executor(problem, plan, use_triton=True, packed=packed)
    made.load(plan, problem.req_to_token, problem.pool)
    generator = torch.Generator().manual_seed(5)
    for step in range(18):
        slots = torch.cat([problem.grow(generator), torch.zeros(PADDING, dtype=torch.int64)])
        for _ in range(2):
            made.append(problem.seq_lens, slots)
        if step in (0, 1, 17):
            compare(problem, plan, made)


def test_the_comparison_finds_a_missing_append():
    paths = path_table([(-1, 40)], [0, 0, 0], [15, 16, 1])
    problem = make_problem(paths, HEADS, torch.float16)
    plan = planner(HEADS, "naive").plan(paths)
    made = executor(problem, plan, use_triton=True)
    made.load(plan, problem.req_to_token, problem.pool)
    problem.grow(torch.Generator().manual_seed(5))
    with pytest.raises(AssertionError):
        compare(problem, plan, made)


def test_plans_follow_each_other_on_one_workspace():
    """Each after a larger or smaller one; the first again at the end, bit for bit."""
    problems, plans = [], []
    for seed, batch in ((1, 7), (2, 3), (3, 10)):
        paths = random_paths(seed, batch, 7, lengths=(1, 16, 40, 65))
        problems.append(make_problem(paths, HEADS, torch.float32, seed=seed))
        plans.append(planner(HEADS, STRATEGIES[seed]).plan(paths))
    made = executor(problems[0], *plans, use_triton=True)
    results = []
    for i in (0, 1, 2, 0):
        check(problems[i], plans[i], made)
        results.append(run(made, problems[i])[0])
    assert torch.equal(results[0], results[3])


def test_two_layers_run_on_one_plan():
    paths = random_paths(9, 6, 5, lengths=(1, 16, 40))
    plan = planner(HEADS, "pat").plan(paths)
    first, second = (make_problem(paths, HEADS, torch.float32, seed=s) for s in (1, 2))
    second.req_to_token, second.pool = first.req_to_token, first.pool
    made = executor(first, plan, use_triton=True)
    check(first, plan, made)
    # the same slots, other values
    generator = torch.Generator().manual_seed(0)
    used = ~first.k[:, 0, 0].isnan()
    second.k, second.v = first.k.clone(), first.v.clone()
    second.k[used] = torch.randn(second.k[used].shape, generator=generator)
    second.v[used] = torch.randn(second.v[used].shape, generator=generator)
    compare(second, plan, made)


def test_values_at_both_ends_of_float16():
    """Partial results are float16 for half-precision models, scaled row by row: values near its
    largest number, or among its subnormal ones, lose nothing by it."""
    paths = path_table([(-1, 70)], [0, 0, -1], [20, 33, 80])
    for scale in (3e4, 1e-4):
        problem = make_problem(paths, HEADS, torch.float16)
        problem.v = (problem.v.float() / 8 * scale).half()
        plan = planner(HEADS, "naive").plan(paths)
        made = executor(problem, plan, use_triton=True)
        made.load(plan, problem.req_to_token, problem.pool)
        assert_attention(problem, *run(made, problem))


def test_without_lse():
    """The library's default: out_lse is None, and nothing else changes."""
    paths = random_paths(2, 5, 4, lengths=(1, 16, 40))
    problem = make_problem(paths, HEADS, torch.float32)
    plan = planner(HEADS, "naive").plan(paths)
    made = executor(problem, plan, use_triton=True)
    made.load(plan, problem.req_to_token, problem.pool)
    with_lse, _ = run(made, problem)
    out = torch.full_like(problem.q, float("nan"))
    made.run(problem.layer(out))
    assert torch.equal(out, with_lse)


def test_strided_tensors():
    """q, out and caches may be slices of larger tensors: only the last two dimensions are dense."""
    paths = random_paths(2, 5, 4, lengths=(1, 16, 40))
    problem = make_problem(paths, HEADS, torch.float32)
    plan = planner(HEADS, "naive").plan(paths)
    made = executor(problem, plan, use_triton=True)
    made.load(plan, problem.req_to_token, problem.pool)
    want, _ = run(made, problem)
    both = torch.stack([problem.k, problem.v], dim=1)  # [slots, 2, Hkv, D]
    q = torch.stack([torch.full_like(problem.q, float("nan")), problem.q], dim=1)
    out = torch.full_like(q, float("nan"))
    made.run(problem.layer(out[:, 0], q=q[:, 1], k_cache=both[:, 0], v_cache=both[:, 1]))
    assert torch.equal(out[:, 0], want) and out[:, 1].isnan().all()


def test_library_api():
    """PrefixDecodeWrapper runs the kernels here, with its own tiles and costs."""
    paths = random_paths(6, 7, 5, lengths=(1, 16, 40))
    problem = make_problem(paths, HEADS, torch.float16)
    made = planned_wrapper(problem)
    assert isinstance(made._executor.backend, TritonBackend)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        out, lse = made.run(problem.q, (problem.k, problem.v), return_lse=True)
        assert_attention(problem, out, lse.values)
        made.append(problem.grow(generator))
    assert_attention(problem, made.run(problem.q, (problem.k, problem.v)))
