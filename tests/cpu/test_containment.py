"""A value that is no number stays with the requests that see it: plans, run in torch."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_prefix_attn.execute import interpreter as oracle
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.multi_token import multi_token
from tests.support.plan_blocks import poisoned_blocks
from tests.support.poison import CAPPED, NAN, POISONS, Poison, assert_contained, forest, poisoned
from tests.support.problems import make_problem

# keys of one bit a query, and of ranges of rows; latent rows, of which the last element is no value
HEADS = (HeadConfig(8, 2, 8), HeadConfig(2, 2, 8), HeadConfig(7, 1, 8), HeadConfig(12, 1, 12, 8))


def planner(heads, headroom=20):
    return Planner(heads, num_sms=16, headroom=headroom)


def loaded(plan, problem):
    words = torch.from_numpy(plan.words.copy())
    blocks = poisoned_blocks(plan.num_blocks, problem.poison_slot)
    oracle.fill(words, problem.req_to_token, problem.pool, blocks)
    return words, blocks


def attend(words, blocks, problem):
    out, lse = oracle.execute(
        words, problem.q, problem.k, problem.v, blocks,
        sm_scale=problem.sm_scale, logits_soft_cap=problem.soft_cap,
    )  # fmt: skip
    return out.to(problem.dtype), lse.float()


def some_cuts(paths, heads):
    """Plans of the fewest parts and of the most, and of one between."""
    made, tree = planner(heads), build_forest(paths)
    cuts = sorted(made.cuts(tree), key=lambda cut: int(cut.parts.max()))
    assert cuts[0].parts.max() == 1 < cuts[-1].parts.max()
    return [made.serialize(tree, cut) for cut in (cuts[0], cuts[len(cuts) // 2], cuts[-1])]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    ("name", "soft_cap"),
    [(name, 0.0) for name in POISONS] + [(name, 3.0) for name in CAPPED],
)
def test_requests_that_do_not_see_it_are_not_hit(name, heads, soft_cap):
    paths = forest()
    problem = make_problem(paths, heads, torch.float32, soft_cap=soft_cap)
    bad = poisoned(problem, POISONS[name])
    for plan in some_cuts(paths, heads):
        assert_contained(problem, bad, *attend(*loaded(plan, problem), bad))


@pytest.mark.parametrize("cache", ["k", "v"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_token_that_was_appended(cache, heads):
    paths = forest()
    problem = make_problem(paths, heads, torch.float32)
    plan = planner(heads).plan(paths)
    words, blocks = loaded(plan, problem)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        slots = problem.grow(generator)
        oracle.append(words, problem.seq_lens, slots, blocks)
    bad = poisoned(problem, Poison(cache, NAN, 4, lambda n: n - 7))
    assert_contained(problem, bad, *attend(words, blocks, bad))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["k", "v"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_token_that_later_tokens_of_its_request_see(cache, heads):
    asked = multi_token(forest(), [4, 1, 9, 1, 1, 33, 2, 1, 5], heads, torch.float32)
    tree = build_forest(asked.requests.paths, asked.query_lens)
    made = planner(heads)
    # the fifth newest of 33: 28 queries come before it
    queries = int(asked.query_lens[:6].sum()) - 1
    bad = poisoned(asked.queries, Poison(cache, NAN, queries, lambda n: n - 5))
    for cut in sorted(made.cuts(tree), key=lambda cut: int(cut.parts.max()))[:: -len(tree.parent)]:
        words, blocks = loaded(made.serialize(tree, cut), asked.requests)
        assert_contained(asked.queries, bad, *attend(words, blocks, bad))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_cpu_server_keeps_it_with_its_request(heads):
    paths = forest()
    problem = make_problem(paths, heads, torch.float32)
    bad = poisoned(problem, POISONS["private V"])
    plan = planner(heads).plan(paths)
    executor = PlanExecutor(
        TorchBackend(heads, torch.float32, torch.device("cpu"), plan.tile_rows),
        Capacity.for_plans(plan),
    )
    executor.load(plan, problem.req_to_token, problem.pool)
    out = torch.full_like(problem.q[..., : heads.value_dim], math.nan)
    executor.run(bad.layer(out))
    assert_contained(problem, bad, out)


@pytest.mark.parametrize("name", ["private V", "V of a node that some share"])
def test_full_attention_hides_nothing(name):
    """It is what others are judged by."""
    heads = HEADS[0]
    problem = make_problem(forest(), heads, torch.float32)
    bad = poisoned(problem, POISONS[name])
    out, lse = full_attention(
        bad.q, bad.k, bad.v, bad.req_to_token, bad.pool, bad.seq_lens, sm_scale=bad.sm_scale
    )
    assert_contained(problem, bad, out.float(), lse.values.float())


def sees_one_row_more(keys, rows, group, tile_rows, sees=oracle.sees):
    return sees(keys, rows, group, tile_rows) | sees(keys, rows - 1, group, tile_rows)


@pytest.mark.parametrize("fault", ["sees", "clean"])
def test_a_planted_fault_is_found(fault, monkeypatch):
    heads, paths = HEADS[1], forest()
    problem = make_problem(paths, heads, torch.float32)
    bad = poisoned(problem, POISONS["private V"])
    (plan, *_) = some_cuts(paths, heads)
    words, blocks = loaded(plan, problem)
    assert_contained(problem, bad, *attend(words, blocks, bad))
    if fault == "sees":
        monkeypatch.setattr(oracle, "sees", sees_one_row_more)
    else:
        monkeypatch.setattr(oracle, "clean", lambda k, v: (k, v))
    with pytest.raises(AssertionError):
        assert_contained(problem, bad, *attend(words, blocks, bad))
