"""Hopper's kernel's own source over aligned plans, emulated on a CPU: a request's results are the
same bits in each batch, and faults in its source are found."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support import emulated_gluon
from tests.support.emulated_hopper import EmulatedHopper
from tests.support.problems import E4M3, assert_attention
from tests.support.running import poison
from tests.support.universe import Universe, batches, differing

PART = 128
BITS, RANGES = HeadConfig(4, 1, 64), HeadConfig(2, 2, 64)
BATCHES = (0, 2, 4, 9, 11, 14)  # of 13, and of single requests behind them


@pytest.fixture(autouse=True)
def _rows_by_themselves(monkeypatch):
    """As tensor cores multiply: what a library makes of a row depends on where it stands."""

    def mma(a, b, acc, use_acc=True, is_async=True):
        a, b = (x.memory if isinstance(x, emulated_gluon.Shared) else x for x in (a, b))
        product = (a.double() @ b.double()).float()
        return acc + product if use_acc else product

    monkeypatch.setitem(emulated_gluon._GL, "warpgroup_mma", mma)
    monkeypatch.setitem(
        emulated_gluon._GL, "exp2", lambda x: torch.exp(x.double() * math.log(2)).float()
    )


def planner_of(heads, part_tokens, headroom=0):
    return lambda num_sms: Planner(
        heads, num_sms=num_sms, headroom=headroom, part_tokens=part_tokens
    )


def load(plan, problem, part_tokens=PART, faults=()):
    backend = EmulatedHopper(problem.heads, problem.dtype, torch.device("cpu"), False, part_tokens)
    backend.num_sms, backend.faults = 3, faults
    executor = PlanExecutor(backend, Capacity.for_plans(plan))
    poison(executor, problem)
    executor.load(plan, problem.req_to_token, problem.pool)
    return executor


def attend(executor, problem):
    out = torch.full_like(problem.q, math.nan)
    lse = torch.full(out.shape[:2], math.nan)
    executor.run(problem.layer(out, out_lse=lse))
    assert not executor.workspace.counters.any(), "the next launch starts from counters of 0"
    return out, lse


def small(heads, **options):
    return Universe.small(heads, 12, dtype=torch.bfloat16, **options)


def all_differing(universe, part_tokens=PART, chosen=BATCHES, faults=()):
    found, wrong = {}, []
    for i, batch in enumerate(batches(universe, planner_of(universe.heads, part_tokens))):
        if i in chosen:
            executor = load(batch.plan, batch.problem, part_tokens, faults)
            wrong += differing(found, batch, *attend(executor, batch.problem))
        if i >= max(chosen):
            return wrong


@pytest.mark.long
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (BITS, {"soft_cap": 20.0, "has_sinks": True}),
        (RANGES, {"spread": 9.0}),
        (BITS, {"spread": 9.0, "kv_dtype": E4M3}),
        pytest.param(HeadConfig(7, 1, 128), {}, marks=pytest.mark.slow),
        pytest.param(HeadConfig(2, 1, 256), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_requests_bits_are_the_same_in_each_batch(heads, options):
    assert all_differing(small(heads, **options)) == []


@pytest.mark.long
def test_the_default_mode_does_not_do_that():
    assert len({i for i, _ in all_differing(small(BITS), 0)}) > 6


@pytest.mark.long
def test_appended_plans_have_the_bits_of_fresh_ones():
    universe, made = small(BITS), planner_of(BITS, PART, 40)(3)
    universe.requests = [(leaf, tail + 35) for leaf, tail in universe.requests]
    ids = list(range(12))
    problem = universe.problem(ids, less=35)
    executor = load(made.plan(problem.paths), problem)
    for less in range(35, 0, -1):
        executor.append(problem.seq_lens + 1, universe.grow(problem, ids, less))
    fresh = universe.problem(ids, seed=3)
    mine, its = attend(executor, problem), attend(load(made.plan(fresh.paths), fresh), fresh)
    assert_attention(problem, *mine)
    assert all(torch.equal(*pair) for pair in zip(mine, its, strict=True))


FAULTS = {
    "maxima of a warp": ("grow", "GROW_BY_ROW if BY_ROW else GROW", "GROW"),
    "normalised parts": ("store_results", ", acc, mask", ", acc * inv[:, None], mask"),
    "half-precision parts": (
        "store_results", ", acc, mask", ", acc.to(gl.float16).to(gl.float32), mask",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    universe = small(BITS, spread=9.0)
    assert all_differing(universe, chosen=(0, 4, 11), faults=[FAULTS[fault]])


@pytest.mark.long
def test_a_nan_of_another_request_changes_nothing():
    universe, ids = small(BITS), list(range(9))
    problem, dirty = universe.problem(ids), universe.problem(ids)
    dirty.v[int(dirty.last_slots()[4]), 0, 3] = math.nan
    plan = planner_of(BITS, PART)(16).plan(problem.paths)
    (out, _), (want, _) = (attend(load(plan, x), x) for x in (dirty, problem))
    others = [i for i in ids if i != 4]
    assert torch.equal(out[others], want[others]) and out[4].isnan().all()
