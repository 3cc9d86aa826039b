"""A request's results over aligned plans, run in torch, are the same bits in each batch."""

from __future__ import annotations

import pytest
import torch

from sgl_prefix_attn.execute import interpreter as oracle
from sgl_prefix_attn.execute import row_sums
from sgl_prefix_attn.execute.row_sums import RowSums
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import PortableRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig, PathTable
from tests.support.interpreter_process import run_interpreted
from tests.support.multi_token import multi_token
from tests.support.plan_blocks import poisoned_blocks
from tests.support.problems import E4M3, assert_attention, make_problem
from tests.support.universe import Universe, batches, differing

HEADS = (HeadConfig(8, 2, 16), HeadConfig(7, 1, 16), HeadConfig(2, 2, 16))


def planner_of(heads, part_tokens=128, headroom=0):
    def planner(num_sms):
        return Planner(
            heads, num_sms=num_sms, rates=PortableRates(), headroom=headroom,
            part_tokens=part_tokens,
        )  # fmt: skip

    return planner


def loaded(plan, problem):
    words = torch.from_numpy(plan.words.copy())
    blocks = poisoned_blocks(plan.num_blocks, problem.poison_slot)
    oracle.fill(words, problem.req_to_token, problem.pool, blocks)
    return words, blocks


def attend(words, blocks, problem):
    return oracle.execute(
        words, problem.q, problem.k, problem.v, blocks,
        sm_scale=problem.sm_scale * problem.k_scale, logits_soft_cap=problem.soft_cap,
        sinks=problem.sinks, v_scale=problem.v_scale,
    )  # fmt: skip


def run(plan, problem):
    return attend(*loaded(plan, problem), problem)


def all_differing(universe, planner, most=99):
    found: dict = {}
    return [
        wrong
        for batch, _ in zip(batches(universe, planner), range(most), strict=False)
        for wrong in differing(found, batch, *run(batch.plan, batch.problem))
    ]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_requests_bits_are_the_same_in_each_batch(heads):
    universe = Universe.small(heads)
    assert all_differing(universe, planner_of(heads)) == []


@pytest.mark.slow
def test_with_sinks_and_a_cap():
    universe = Universe.small(HEADS[0], soft_cap=3.0, has_sinks=True)
    assert all_differing(universe, planner_of(HEADS[0]), most=13) == []


@pytest.mark.slow
def test_over_a_cache_of_e4m3():
    universe = Universe.small(HEADS[0], kv_dtype=E4M3)
    assert all_differing(universe, planner_of(HEADS[0]), most=13) == []
    problem = universe.problem(list(range(24)))
    out, lse = run(planner_of(HEADS[0])(16).plan(problem.paths), problem)
    assert_attention(problem, out.float(), lse.float())


def test_the_default_mode_does_not_do_that():
    universe = Universe.small(HEADS[0])
    wrong = all_differing(universe, planner_of(HEADS[0], part_tokens=0), most=13)
    assert len({i for i, _ in wrong}) > len(universe.requests) // 2


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_appended_plans_have_the_bits_of_fresh_ones(heads):
    """Through blocks and parts that begin on the way."""
    universe, made = Universe.small(heads), planner_of(heads, headroom=40)(16)
    universe.requests = [(leaf, tail + 35) for leaf, tail in universe.requests]
    ids = list(range(len(universe.requests)))
    problem = universe.problem(ids, less=35)
    words, blocks = loaded(made.plan(problem.paths), problem)
    for less in range(35, 0, -1):
        slots = universe.grow(problem, ids, less)
        oracle.append(words, problem.seq_lens, slots, blocks)
    fresh = universe.problem(ids, seed=3)
    assert problem.seq_lens.tolist() == fresh.seq_lens.tolist()
    results = zip(attend(words, blocks, problem), run(made.plan(fresh.paths), fresh), strict=True)
    assert all(torch.equal(mine, its) for mine, its in results)


def test_a_token_has_the_same_bits_whoever_attends_beside_it():
    """Prefilled or verified together with others of its request, or decoded by itself."""
    heads = HEADS[1]
    paths = Universe.small(heads).problem(list(range(6))).paths
    asked = multi_token(paths, [1, 1, 30, 1, 20, 5], heads, torch.float32)
    made = planner_of(heads)(16)
    of, queries = asked.requests, asked.queries
    plan = made.plan_forest(build_forest(of.paths, asked.query_lens))
    words, blocks = loaded(plan, of)
    out, lse = oracle.execute(words, queries.q, of.k, of.v, blocks, sm_scale=of.sm_scale)
    lens = queries.seq_lens.tolist()
    apart = PathTable.of([], [], [-1] * len(lens), lens)
    alone, alone_lse = run(made.plan(apart), queries)
    assert torch.equal(out, alone) and torch.equal(lse, alone_lse)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_it_is_full_attention(heads):
    universe = Universe.small(heads, soft_cap=5.0)
    problem = universe.problem(list(range(24)))
    out, lse = run(planner_of(heads)(16).plan(problem.paths), problem)
    assert_attention(problem, out.float(), lse.float())


# --- what must be found ---------------------------------------------------------------------------
def _maxima_of_the_item(patch):
    """Rescaled where any row's scores rise, as warps decide together."""
    over = RowSums.over

    def together(sums, logits, v):
        rises = logits.amax(2) > sums.top
        top = torch.where(rises.any(), logits.amax(2).clamp(min=-1e30), sums.top)
        shrink = torch.exp(sums.top - torch.maximum(top, sums.top))
        scaled = RowSums(sums.acc * shrink[..., None], torch.maximum(top, sums.top),
                         sums.total * shrink)  # fmt: skip
        return over(scaled._replace(top=scaled.top + rises.any()), logits, v)

    patch.setattr(RowSums, "over", together)


def _half_precision_partials(patch):
    merged = row_sums.merged

    def rounded(parts):
        if len(parts) > 1:
            parts = [x._replace(acc=x.acc.half().float()) for x in parts]
        return merged(parts)

    patch.setattr(row_sums, "merged", rounded)


def _merged_in_pairs(patch):
    merged = row_sums.merged
    patch.setattr(
        row_sums,
        "merged",
        lambda parts: (
            merged([merged(parts[: len(parts) // 2]), merged(parts[len(parts) // 2 :])])
            if len(parts) > 2
            else merged(parts)
        ),
    )


@pytest.mark.parametrize("fault", [_maxima_of_the_item, _half_precision_partials, _merged_in_pairs])
def test_a_planted_fault_is_found(fault, monkeypatch):
    universe = Universe.small(HEADS[0])
    fault(monkeypatch)
    assert all_differing(universe, planner_of(HEADS[0]))


def test_a_plan_with_other_parts_is_found():
    """The length of a part is part of the result."""
    universe, found, wrong = Universe.small(HEADS[0]), {}, []
    for part_tokens in (128, 192):
        batch = next(iter(batches(universe, planner_of(HEADS[0], part_tokens))))
        wrong += differing(found, batch, *run(batch.plan, batch.problem))
    assert wrong


def test_a_nan_of_another_request_changes_nothing():
    heads = HEADS[0]
    problem, dirty = (make_problem(Universe.small(heads).problem([*range(9)]).paths, heads)
                      for _ in range(2))  # fmt: skip
    dirty.v[int(dirty.last_slots()[4]), 0, 3] = float("nan")
    plan = planner_of(heads)(16).plan(problem.paths)
    out, want = run(plan, dirty)[0], run(plan, problem)[0]
    others = [i for i in range(9) if i != 4]
    assert torch.equal(out[others], want[others]) and out[4, :4].isnan().all()


@pytest.mark.long
def test_the_portable_kernel_in_the_interpreter():
    run_interpreted("interpreted_invariance.py")
