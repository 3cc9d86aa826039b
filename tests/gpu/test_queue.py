"""The device queue: same result as the plan's interpreter, every run, and tickets back at 0."""

import pytest
import torch

from sgl_prefix_attn.execute import reference
from sgl_prefix_attn.plan import STRATEGIES
from tests.support.forests import splitting_tiles
from tests.support.gpu_problems import (
    LLAMA,
    TREES,
    executor,
    gpu_problem,
    grow,
    loaded,
    planner,
    run,
)

# The kernels' float32 sums in another order, exp2 and log2 of the GPU's special function unit.
LSE_TOLERANCE = 2e-4


def interpreted(made, problem, plan):
    """reference.execute of the words and indices that are on the device."""
    return reference.execute(
        made.workspace.words.cpu(), problem.q.cpu(), problem.k.cpu(), problem.v.cpu(),
        made.workspace.kv_indices.cpu(), problem.seq_lens.cpu(),
        sm_scale=problem.sm_scale, logits_soft_cap=problem.soft_cap,
    )  # fmt: skip


def compare(made, problem, plan):
    out, lse = (t.cpu() for t in run(made, problem))
    assert made.workspace.tickets.eq(0).all(), "the next forward starts from ticket 0"
    want, want_lse = interpreted(made, problem, plan)
    torch.testing.assert_close(lse, want_lse.values, rtol=0, atol=LSE_TOLERANCE)
    # Probabilities are rounded to the model's dtype, and so is the output.
    atol = torch.finfo(problem.dtype).eps * want.abs().max().item()
    torch.testing.assert_close(out.float(), want.float(), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tree", ["mixed", "deep", "forty_roots", "unshared_37", "random"])
def test_kernels_equal_the_plan_interpreter(tree, dtype):
    paths = TREES[tree]()
    problem = gpu_problem(paths, dtype=dtype)
    plan = planner().plan(paths)
    compare(loaded(problem, plan), problem, plan)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_small_tiles_equal_the_plan_interpreter(strategy):
    """Many items of every kind, and splits of 16 tokens, over appends."""
    paths = TREES["random"]()
    problem = gpu_problem(paths)
    tiles = splitting_tiles(LLAMA)
    plan = planner(strategy=strategy, tiles=tiles, headroom=18).plan(paths)
    made = loaded(problem, plan, tiles=tiles)
    compare(made, problem, plan)
    generator = torch.Generator().manual_seed(2)
    for _ in range(17):
        slots = grow(problem, generator)
        made.append(problem.seq_lens, slots)
    compare(made, problem, plan)


@pytest.mark.parametrize("parallel_tiles", [True, False])
def test_runs_are_bit_identical(parallel_tiles):
    """CTAs take items in another order every time; the merge order is the plan's."""
    paths = TREES["mixed"]()
    problem = gpu_problem(paths)
    made = loaded(problem, planner().plan(paths), parallel_tiles=parallel_tiles)
    out, lse = run(made, problem)
    for _ in range(20):
        again, again_lse = run(made, problem)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)


def test_runs_back_to_back_do_not_meet():
    """Many forwards in flight at once, on outputs of their own: tickets and partial rows of one
    must not reach the next."""
    paths = TREES["deep"]()
    problem = gpu_problem(paths)
    made = loaded(problem, planner(strategy="naive").plan(paths))
    want, _ = run(made, problem)
    outs = [torch.full_like(problem.q, float("nan")) for _ in range(64)]
    for out in outs:
        made.run(problem.layer(out))
    for out in outs:
        assert torch.equal(out, want)
    assert made.workspace.tickets.eq(0).all()


def test_serial_and_parallel_tiles_agree_bit_for_bit():
    paths = TREES["mixed"]()
    problem = gpu_problem(paths)
    plan = planner().plan(paths)
    results = [run(loaded(problem, plan, parallel_tiles=p), problem)[0] for p in (True, False)]
    assert torch.equal(*results)


def test_plans_follow_each_other_on_one_workspace():
    """Each after a larger or smaller one, none synchronised; the first again at the end."""
    problems = [gpu_problem(TREES[t]()) for t in ("mixed", "one_token", "one_root_113", "deep")]
    plans = [planner().plan(problem.paths) for problem in problems]
    made = executor(problems[0], *plans)
    results = []
    for i in (0, 1, 2, 3, 0):
        made.load(plans[i], problems[i].req_to_token, problems[i].pool)
        results.append(run(made, problems[i])[0])
    assert torch.equal(results[0], results[4])
    for i, (problem, plan) in enumerate(zip(problems, plans, strict=True)):
        made.load(plan, problem.req_to_token, problem.pool)
        compare(made, problem, plan)
        assert not results[i].isnan().any()
