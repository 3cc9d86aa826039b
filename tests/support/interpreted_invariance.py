"""The portable kernel over aligned plans in Triton's interpreter: a request's results are the same
bits in each batch; run by test_portable_kernel.py as interpreted_portable.py is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from sgl_prefix_attn.execute.backends.portable_backend import PortableBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.kernels.portable import tile_results
from sgl_prefix_attn.plan.kernel_rates import PortableRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.interpreted_portable import check, run
from tests.support.running import poison
from tests.support.universe import Universe, batches, differing

CPU = torch.device("cpu")
SHAPES = {
    "gqa4": (HeadConfig(8, 2, 64), torch.float16, {}),
    "gqa7-96": (HeadConfig(7, 1, 96), torch.float16, {"soft_cap": 5.0, "has_sinks": True}),
    "mha": (HeadConfig(2, 2, 64), torch.float16, {}),
}
# of 13: planned, permuted, widest, one wide, less sharing declared, in other slots
BATCHES = (0, 1, 2, 4, 8, 11)


@pytest.fixture(autouse=True)
def _products_row_by_row(monkeypatch):
    """As tensor cores multiply: what a library makes of a row depends on where it stands."""

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        x, y = (operand.data.astype(np.float64) for operand in (a, b))
        return TensorHandle((x @ y).astype(np.float32) + d.data, d.dtype.scalar)

    def exactly(function):
        def rounded(self, x):
            return TensorHandle(function(x.data.astype(np.float64)).astype(np.float32), tl.float32)

        return rounded

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    for name, function in (("exp2", np.exp2), ("exp", np.exp), ("log2", np.log2)):
        monkeypatch.setattr(InterpreterBuilder, f"create_{name}", exactly(function))


def small(name):
    heads, dtype, options = SHAPES[name]
    return Universe.small(heads, 12, dtype=dtype, **options)


def planner_of(heads, part_tokens, headroom=0):
    def planner(num_sms):
        return Planner(
            heads, num_sms=num_sms, rates=PortableRates(), headroom=headroom,
            tile_rows=PortableBackend.config_for(heads).tile_rows, part_tokens=part_tokens,
        )  # fmt: skip

    return planner


def load(plan, problem, part_tokens=128) -> PlanExecutor:
    backend = PortableBackend(problem.heads, problem.dtype, CPU, part_tokens=part_tokens)
    executor = PlanExecutor(backend, Capacity.for_plans(plan))
    poison(executor, problem)
    executor.load(plan, problem.req_to_token, problem.pool)
    return executor


def all_differing(universe, part_tokens=128, chosen=BATCHES):
    found, wrong = {}, []
    for i, batch in enumerate(batches(universe, planner_of(universe.heads, part_tokens))):
        if i in chosen:
            executor = load(batch.plan, batch.problem, part_tokens)
            wrong += differing(found, batch, *run(executor, batch.problem))
        if i > max(chosen):
            break
    return wrong


@pytest.mark.parametrize("name", SHAPES)
def test_a_requests_bits_are_the_same_in_each_batch(name):
    assert all_differing(small(name), chosen=(*BATCHES, 13, 17)) == []


def test_the_default_mode_does_not_do_that():
    assert len({i for i, _ in all_differing(small("gqa4"), 0)}) > 6


@pytest.mark.parametrize("name", SHAPES)
def test_appended_plans_have_the_bits_of_fresh_ones(name):
    """And both are attention."""
    universe, made = small(name), planner_of(SHAPES[name][0], 128, 40)(16)
    universe.requests = [(leaf, tail + 35) for leaf, tail in universe.requests]
    ids = list(range(12))
    problem = universe.problem(ids, less=35)
    executor = load(made.plan(problem.paths), problem)
    for less in range(35, 0, -1):
        executor.append(problem.seq_lens + 1, universe.grow(problem, ids, less))
    fresh = universe.problem(ids, seed=3)
    check(executor, problem)
    results = zip(
        run(executor, problem), run(load(made.plan(fresh.paths), fresh), fresh), strict=True
    )
    assert all(torch.equal(mine, its) for mine, its in results)


@pytest.mark.parametrize("cache", ["k", "v"])
def test_what_is_not_finite_changes_no_other_requests_bits(cache):
    universe, ids = small("gqa4"), list(range(9))
    problem, dirty = universe.problem(ids), universe.problem(ids)
    getattr(dirty, cache)[int(dirty.last_slots()[4]), 0, 3] = float("nan")
    shared = int(dirty.req_to_token[dirty.pool[0], 210])  # of a node: requests 0 and 6
    getattr(dirty, cache)[shared, 1, 5] = float("inf")
    plan = planner_of(universe.heads, 128)(16).plan(problem.paths)
    (out, lse), (want, want_lse) = run(load(plan, dirty), dirty), run(load(plan, problem), problem)
    assert out[4, :4].isnan().all()
    finite = torch.ones(9, 8, dtype=torch.bool)
    finite[4, :4] = False
    for i in ids:
        if shared in dirty.slots()[i].tolist():
            finite[i, 4:] = False
    assert 0 < finite[:, 4:].sum() < 36
    assert torch.equal(out[finite], want[finite]) and torch.equal(lse[finite], want_lse[finite])


# --- what must be found ---------------------------------------------------------------------------
def _half_precision_partials(patch):
    load_once = PlanExecutor.load

    def with_halves(self, *args):
        workspace = self.workspace
        object.__setattr__(workspace, "partial_out", workspace.partial_out.half())
        load_once(self, *args)

    patch.setattr(PlanExecutor, "load", with_halves)


def _normalised_partials(patch):
    add = tile_results.add_partial

    def normalised(acc, row_max, total, i_row, ok, *args):
        acc, row_max, total = add(acc, row_max, total, i_row, ok, *args)
        inv = 1.0 / total
        return acc * inv[:, None], row_max, total * inv

    patch.setattr(tile_results, "add_partial", normalised)


@pytest.mark.parametrize("fault", [_half_precision_partials, _normalised_partials])
def test_a_planted_fault_is_found(fault, monkeypatch):
    fault(monkeypatch)
    assert all_differing(small("gqa4"), chosen=(1, 4))


def test_plans_of_the_other_kind_are_refused():
    heads, problem = SHAPES["gqa4"][0], small("gqa4").problem([0, 1])
    with pytest.raises(ValueError, match="128 positions, the kernel's 0"):
        load(planner_of(heads, 128)(16).plan(problem.paths), problem, 0)
    with pytest.raises(ValueError, match="0 positions, the kernel's 128"):
        load(planner_of(heads, 0)(16).plan(problem.paths), problem, 128)
