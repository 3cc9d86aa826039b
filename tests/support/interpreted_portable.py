"""The portable kernel in Triton's interpreter, against the torch interpreter of the words and full
attention; run by test_portable_kernel.py in a process of its own, because TRITON_INTERPRET=1 must
be set before the kernels are imported."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from sgl_prefix_attn.execute import interpreter as oracle
from sgl_prefix_attn.execute.backends.portable_backend import PortableBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.kernels.portable import query_merge, tile_results
from sgl_prefix_attn.kernels.portable.portable_options import portable_config
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import PortableRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig, PathTable
from tests.support.forests import path_table, random_paths
from tests.support.multi_token import multi_token
from tests.support.problems import Problem, assert_attention, make_problem
from tests.support.running import plan_wrapper, planned_several
from tests.support.sinks import sinks_of

assert os.environ.get("TRITON_INTERPRET") == "1"

CPU = torch.device("cpu")
LENGTHS = (1, 2, 7, 16, 17, 63, 64, 65, 130)


class Shape(NamedTuple):
    """What the kernel is built for, and by which of its constants."""

    heads: tuple[int, int, int]
    batch: int
    nodes: int
    dtype: torch.dtype = torch.float32
    soft_cap: float = 0.0
    growth: int = 3
    config: dict = {}  # noqa: RUF012


SHAPES = {
    "gqa4": Shape((8, 2, 64), 13, 6, torch.float16),
    "gqa4-wide-blocks": Shape((8, 2, 64), 13, 6, config={"block_n": 64}),
    "mha": Shape((2, 2, 64), 40, 5, growth=20),
    "gqa3-96": Shape((6, 2, 96), 9, 4, soft_cap=3.0, growth=2),
    "gqa7-128": Shape((14, 2, 128), 9, 4, torch.float16, growth=5),
    "gqa16-256": Shape((16, 1, 256), 6, 3, torch.float16, soft_cap=30.0, growth=2),
    "71-heads": Shape((71, 1, 64), 5, 3, growth=2),
    "128-heads": Shape((128, 1, 64), 3, 2, torch.float16, growth=2),
    "dim-16": Shape((4, 2, 16), 21, 6, soft_cap=2.0, growth=6),
    "16-rows": Shape((4, 1, 80), 11, 5, config={"tile_rows": 16}),
    "128-rows": Shape((4, 1, 64), 33, 5, config={"tile_rows": 128}),
}


class Made(NamedTuple):
    backend: PortableBackend
    planner: Planner


def make(
    heads: HeadConfig, dtype: torch.dtype, headroom: int, strategy: str = "calibrated", **config
) -> Made:
    built = replace(portable_config(heads.group_size, heads.head_dim), **config)
    backend = PortableBackend(heads, dtype, CPU, built)
    planner = Planner(
        heads, num_sms=backend.num_sms, rates=PortableRates(), headroom=headroom,
        tile_rows=backend.tile_rows, strategy=strategy, splits_nodes=backend.splits_nodes,
    )  # fmt: skip
    return Made(backend, planner)


def load(made: Made, plan, problem: Problem) -> PlanExecutor:
    """The plan in an executor whose memory was poison."""
    executor = PlanExecutor(made.backend, Capacity.for_plans(plan))
    workspace = executor.workspace
    workspace.kv_indices.fill_(problem.poison_slot)
    workspace.keys.fill_(-1)
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_state.fill_(float("nan"))
    executor.load(plan, problem.req_to_token, problem.pool)
    return executor


def run(executor: PlanExecutor, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(problem.q, float("nan"))
    lse = torch.full(problem.q.shape[:2], float("nan"))
    executor.run(problem.layer(out, out_lse=lse))
    assert not executor.workspace.counters.any(), "counters are not as they were"
    return out, lse


def check(executor: PlanExecutor, problem: Problem) -> None:
    out, lse = run(executor, problem)
    assert_attention(problem, out, lse)


def cuts_of(planner: Planner, forest) -> list:
    """The fastest cut, and one that is split where any is."""
    cuts = sorted(planner.cuts(forest), key=lambda cut: cut.us)
    split = [cut for cut in cuts[1:] if cut.parts.max(initial=1) > 1]
    return [cuts[0], *split[-1:]]


@pytest.mark.parametrize("name", SHAPES)
def test_random_forests_through_growth(name):
    shape = SHAPES[name]
    heads = HeadConfig(*shape.heads)
    made = make(heads, shape.dtype, shape.growth, **shape.config)
    paths = random_paths(len(name), shape.batch, shape.nodes, LENGTHS)
    forest = build_forest(paths)
    for cut in cuts_of(made.planner, forest):
        problem = make_problem(
            paths, heads, shape.dtype, soft_cap=shape.soft_cap, room=shape.growth
        )
        plan = made.planner.serialize(forest, cut)
        executor = load(made, plan, problem)
        check(executor, problem)
        generator = torch.Generator().manual_seed(1)
        for _ in range(shape.growth):
            executor.append(problem.seq_lens + 1, problem.grow(generator))
        check(executor, problem)


def long_and_short(dtype=torch.float32) -> tuple[Problem, PathTable]:
    paths = path_table([(-1, 1297)], [0, 0, 0, -1, -1, -1], [1, 63, 597, 1, 63, 700])
    return make_problem(paths, HeadConfig(4, 2, 64), dtype), paths


def test_parts_of_split_tiles_are_merged():
    problem, paths = long_and_short()
    made = make(problem.heads, torch.float32, 0)
    forest = build_forest(paths)
    cuts = [cut for cut in made.planner.cuts(forest) if cut.parts.max() > 2]
    assert cuts
    for cut in cuts[:2]:
        check(load(made, made.planner.serialize(forest, cut), problem), problem)


NODE_SHAPES = {
    "naive": Shape((8, 2, 64), 19, 6, torch.float16),
    "compute": Shape((14, 2, 96), 9, 5, soft_cap=3.0, growth=2),
    "pat": Shape((71, 1, 64), 7, 4, growth=2),
}


@pytest.mark.parametrize("strategy", NODE_SHAPES)
def test_nodes_that_are_split_off(strategy):
    shape = NODE_SHAPES[strategy]
    heads = HeadConfig(*shape.heads)
    made = make(heads, shape.dtype, shape.growth, strategy)
    paths = random_paths(7, shape.batch, shape.nodes, LENGTHS)
    forest = build_forest(paths)
    for cut in cuts_of(made.planner, forest):
        assert cut.split_off
        problem = make_problem(
            paths, heads, shape.dtype, soft_cap=shape.soft_cap, room=shape.growth
        )
        executor = load(made, made.planner.serialize(forest, cut), problem)
        check(executor, problem)
        generator = torch.Generator().manual_seed(1)
        for _ in range(shape.growth):
            executor.append(problem.seq_lens + 1, problem.grow(generator))
        check(executor, problem)


def test_parts_of_nodes_that_are_split_off():
    problem, paths = long_and_short()
    made = make(problem.heads, torch.float32, 0, "naive")
    forest = build_forest(paths)
    cuts = [cut for cut in made.planner.cuts(forest) if cut.parts[: cut.split_off].max() > 2]
    assert cuts
    for cut in cuts[:2]:
        check(load(made, made.planner.serialize(forest, cut), problem), problem)


@pytest.mark.parametrize("strategy", ["calibrated", "naive"])
def test_several_tokens_a_request(strategy):
    heads = HeadConfig(7, 1, 96)
    made = make(heads, torch.float32, 0, strategy)
    paths = random_paths(15, 5, 4, [20 + length for length in LENGTHS])
    lens = np.array([1, 9, 3, 5, 2], np.int32)
    problem = make_problem(paths, heads)
    problem.q = torch.randn(int(lens.sum()), 7, 96, generator=torch.Generator().manual_seed(1))
    forest = build_forest(paths, lens)
    for cut in cuts_of(made.planner, forest):
        executor = load(made, made.planner.serialize(forest, cut), problem)
        out, lse = run(executor, problem)
        ws = executor.workspace
        want, want_lse = oracle.execute(
            ws.words, problem.q, problem.k, problem.v, oracle.Blocks(ws.kv_indices, ws.keys),
            sm_scale=problem.sm_scale,
        )  # fmt: skip
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_the_wrapper_verifies_and_decodes():
    heads, paths = HeadConfig(4, 1, 64), path_table([(-1, 70)], [0, 0, -1], [3, 4, 7])
    asked = multi_token(paths, [3, 1, 2], heads, torch.float16)
    made = planned_several(asked, kernels="portable")
    backend, queries = made._executor.backend, asked.queries
    assert type(backend) is PortableBackend
    out, lse = made.run(queries.q, (queries.k, queries.v), return_lse=True)
    assert_attention(queries, out, lse.values)
    problem = make_problem(paths, heads, torch.float16)
    plan_wrapper(made, problem)
    made.append(problem.grow(torch.Generator().manual_seed(1)))
    assert_attention(problem, made.run(problem.q, (problem.k, problem.v)))
    assert made._executor.backend is backend


def test_nothing_to_do():
    made = make(HeadConfig(4, 2, 64), torch.float32, 0)
    none = np.empty(0, np.int32)
    plan = made.planner.plan(PathTable(none, none, none.astype(np.int64), none, none))
    problem, _ = long_and_short()
    executor = load(made, plan, problem)
    out, _ = run(executor, problem)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("strategy", "tile_rows"), [("calibrated", 16), ("calibrated", 64), ("naive", 16)]
)
def test_what_is_not_finite_stays_with_those_that_see_it(strategy, tile_rows):
    """One element of one head of a private token, and of a node that half of the requests share."""
    heads = HeadConfig(4, 2, 16)
    made = make(heads, torch.float32, 0, strategy, tile_rows=tile_rows)
    paths = path_table([(-1, 70), (0, 30), (0, 50)], [1, 1, 2, 2, -1, 2], [3, 40, 5, 64, 90, 20])
    forest = build_forest(paths)
    seen = torch.zeros(6, 4, dtype=torch.bool)
    seen[1, :2] = True
    seen[[2, 3, 5], 2:] = True
    for cut in cuts_of(made.planner, forest):
        plan = made.planner.serialize(forest, cut)
        clean = make_problem(paths, heads)
        want, want_lse = run(load(made, plan, clean), clean)
        for cache, value in itertools.product("kv", (float("nan"), float("inf"))):
            dirty = make_problem(paths, heads)
            own = int(dirty.req_to_token[dirty.pool[1], dirty.seq_lens[1] - 1])
            shared = int(dirty.req_to_token[dirty.pool[2], 75])
            for slot, head in ((own, 0), (shared, 1)):
                getattr(dirty, cache)[slot, head, 5] = value
            out, lse = run(load(made, plan, dirty), dirty)
            if (cache, value) != ("k", float("inf")):  # a score of -inf weighs nothing
                assert out[seen].isfinite().logical_not().any(1).all()
            torch.testing.assert_close(out[~seen], want[~seen])
            torch.testing.assert_close(lse[~seen], want_lse[~seen])


SINK_SHAPES = {
    "calibrated": Shape((8, 2, 64), 13, 6, torch.float16, growth=2),
    "mha": Shape((2, 2, 64), 40, 5, growth=2),
    "naive": Shape((14, 2, 96), 9, 5, soft_cap=3.0, growth=2),
    "pat": Shape((71, 1, 64), 7, 4, growth=2),
}


@pytest.mark.parametrize("name", SINK_SHAPES)
def test_sinks_join_each_row_once(name):
    shape = SINK_SHAPES[name]
    heads = HeadConfig(*shape.heads)
    made = make(heads, shape.dtype, shape.growth, "calibrated" if name == "mha" else name)
    paths = random_paths(7, shape.batch, shape.nodes, LENGTHS)
    forest = build_forest(paths)
    for cut in cuts_of(made.planner, forest):
        problem = make_problem(
            paths, heads, shape.dtype, soft_cap=shape.soft_cap, room=shape.growth
        )
        problem.sinks = sinks_of(heads)
        if name == "mha":  # as models have them
            problem.sinks = problem.sinks.bfloat16()
        executor = load(made, made.planner.serialize(forest, cut), problem)
        check(executor, problem)
        generator = torch.Generator().manual_seed(1)
        for _ in range(shape.growth):
            executor.append(problem.seq_lens + 1, problem.grow(generator))
        check(executor, problem)


def loaded_with_sinks(strategy, parts=max):
    """A plan of tiles or nodes (naive) in the most parts, or, with min, of whole tiles."""
    problem, paths = long_and_short()
    problem.sinks, problem.soft_cap = sinks_of(problem.heads), 5.0
    made = make(problem.heads, torch.float32, 0, strategy)
    forest = build_forest(paths)
    cut = parts(made.planner.cuts(forest), key=lambda cut: int(cut.parts.max()))
    assert (cut.parts.max() > 1) == (parts is max)
    return load(made, made.planner.serialize(forest, cut), problem), problem


@pytest.mark.parametrize("strategy", ["calibrated", "naive"])
def test_a_nan_stays_with_its_request_where_there_are_sinks(strategy):
    executor, problem = loaded_with_sinks(strategy)
    want, _ = run(executor, problem)
    own = int(problem.req_to_token[problem.pool[1], problem.seq_lens[1] - 1])
    problem.v[own, 0, 5] = float("nan")
    out, _ = run(executor, problem)
    seen = torch.zeros(6, 4, dtype=torch.bool)
    seen[1, :2] = True
    assert out[seen].isnan().any(1).all()
    torch.testing.assert_close(out[~seen], want[~seen])


def _sink_of_the_next_head(join, inv, row_max, total, sinks_ptr, i_head, ok, has_sink):
    return join(inv, row_max, total, sinks_ptr, i_head ^ 1, ok, has_sink)


def _sink_of_each_part(join, inv, row_max, total, sinks_ptr, i_head, ok, has_sink):
    inv, row_max, total = join(inv, row_max, total, sinks_ptr, i_head, ok, has_sink)
    once = total
    _, row_max, total = join(inv, row_max, total, sinks_ptr, i_head, ok, has_sink)
    return inv * once / total, row_max, total


def _no_sink(join, inv, row_max, total, sinks_ptr, i_head, ok, has_sink):
    return inv, row_max, total


@pytest.mark.parametrize(
    ("module", "strategy", "parts"),
    [
        (query_merge, "calibrated", max),
        (query_merge, "naive", max),
        (tile_results, "calibrated", min),
    ],
    ids=["merge of parts", "merge by query", "whole tiles"],
)
@pytest.mark.parametrize("fault", [_sink_of_the_next_head, _sink_of_each_part, _no_sink])
def test_a_wrong_sink_is_found(fault, module, strategy, parts, monkeypatch):
    executor, problem = loaded_with_sinks(strategy, parts)
    join, called = module.with_sink, []

    def faulty(*args):
        called.append(True)
        return fault(join, *args)

    monkeypatch.setattr(module, "with_sink", faulty)
    with pytest.raises(AssertionError):
        check(executor, problem)
    assert called


def test_a_plan_of_other_tiles_is_refused():
    problem, paths = long_and_short()
    made = make(problem.heads, torch.float32, 0)
    plan = Planner(problem.heads, num_sms=16).plan(paths)
    assert plan.words[W.H_TILE_ROWS] == W.TILE_ROWS
    with pytest.raises(ValueError, match="128 rows"):
        load(made, plan, problem)
