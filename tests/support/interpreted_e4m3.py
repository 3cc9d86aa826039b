"""The portable kernel over caches of float8_e4m3fn in Triton's interpreter; run by
test_portable_kernel.py as interpreted_portable.py is."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from sgl_prefix_attn.kernels.portable import block_loop, row_alone
from sgl_prefix_attn.kernels.portable.narrow_kv import widen
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table, random_paths
from tests.support.interpreted_portable import LENGTHS, check, cuts_of, load, make, run
from tests.support.poison import POISONS, Poison, assert_contained, forest, poisoned
from tests.support.problems import E4M3, make_problem
from tests.support.sinks import sinks_of

NAN = 0x7F  # of either sign


@pytest.fixture(autouse=True)
def _nan(monkeypatch):
    """Triton's interpreter takes the NaN of e4m3 for 480; GPUs do not."""
    convert = interpreter._convert_float

    def with_nan(data, from_type, to_type, rounding):
        made = convert(data, from_type, to_type, rounding)
        if from_type == tl.float8e4nv:
            assert to_type == tl.float16
            made[(data & NAN) == NAN] = 0x7E00
        return made

    monkeypatch.setattr(interpreter, "_convert_float", with_nan)


@triton.jit
def _widened(from_ptr, to_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(to_ptr + i, widen(tl.load(from_ptr + i)))


def test_every_number_of_e4m3():
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3)
    out = torch.empty(256, dtype=torch.float16)
    _widened[(1,)](numbers, out, 256)
    torch.testing.assert_close(out, numbers.to(torch.float16), rtol=0, atol=0, equal_nan=True)


SHAPES = {
    "gqa4": ((8, 2, 64), 13, 6, torch.bfloat16, 0.0, "calibrated"),
    "mha": ((2, 2, 64), 18, 5, torch.float16, 0.0, "calibrated"),
    "gqa7-128": ((14, 2, 128), 9, 4, torch.bfloat16, 3.0, "calibrated"),
    "gqa16-256": ((16, 1, 256), 3, 2, torch.float16, 30.0, "calibrated"),
    "96-nodes": ((6, 2, 96), 9, 5, torch.bfloat16, 0.0, "naive"),
    "71-heads": ((71, 1, 64), 5, 3, torch.bfloat16, 0.0, "pat"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_random_forests_through_growth(name):
    sizes, batch, nodes, dtype, soft_cap, strategy = SHAPES[name]
    heads, growth = HeadConfig(*sizes), 3
    made = make(heads, dtype, growth, strategy)
    paths = random_paths(len(name), batch, nodes, LENGTHS)
    tree = build_forest(paths)
    for cut in cuts_of(made.planner, tree):
        problem = make_problem(paths, heads, dtype, kv_dtype=E4M3, soft_cap=soft_cap, room=growth)
        if name == "gqa7-128":
            problem.sinks = sinks_of(heads)
        executor = load(made, made.planner.serialize(tree, cut), problem)
        check(executor, problem)
        generator = torch.Generator().manual_seed(1)
        for _ in range(growth):
            executor.append(problem.seq_lens + 1, problem.grow(generator))
        check(executor, problem)


HEADS = HeadConfig(4, 2, 64)


def long_and_short(strategy="calibrated", dtype=torch.bfloat16, **changed):
    """A plan of tiles or nodes (naive) in the most parts, and its problem."""
    paths = path_table([(-1, 450)], [0, 0, 0, -1, -1, -1], [1, 63, 130, 1, 63, 250])
    problem = make_problem(paths, HEADS, dtype, kv_dtype=E4M3, soft_cap=3.0)
    for name, value in changed.items():
        setattr(problem, name, value)
    made = make(HEADS, dtype, 0, strategy)
    tree = build_forest(paths)
    cut = max(made.planner.cuts(tree), key=lambda cut: int(cut.parts.max()))
    assert cut.parts.max() > 1
    return load(made, made.planner.serialize(tree, cut), problem), problem


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_queries_of_any_size(size):
    """Half precision has not the range of bfloat16."""
    executor, problem = long_and_short()
    most = problem.q.float().abs().amax()
    problem.q = (problem.q.float() / most * size).to(problem.q)
    problem.sm_scale *= float(most) / size
    check(executor, problem)


def test_queries_of_very_different_elements():
    executor, problem = long_and_short()
    scales = torch.logspace(-3, 3, 64)
    problem.q = (problem.q.float() * scales).to(problem.q)
    problem.sm_scale /= float(scales.square().mean().sqrt())
    check(executor, problem)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("private V", "naive"),
        ("private K", "calibrated"),
        ("V of a node that some share", "calibrated"),
        ("K of the root", "naive"),
    ],
)
def test_a_nan_stays_with_the_requests_that_see_it(name, strategy):
    heads, paths = HeadConfig(4, 2, 32), forest(long=210)
    problem = make_problem(paths, heads, torch.bfloat16, kv_dtype=E4M3)
    bad = poisoned(problem, POISONS[name])
    made = make(heads, torch.bfloat16, 0, strategy, tile_rows=16)
    tree = build_forest(paths)
    cut = cuts_of(made.planner, tree)[0]
    out, lse = run(load(made, made.planner.serialize(tree, cut), bad), bad)
    assert_contained(problem, bad, out, lse)


# --- what must be found ---------------------------------------------------------------------------


def _one_scale(queries, q, scale):
    q, scale = queries(q, scale)
    return q, tl.min(scale) + scale * 0.0


def _bits_lost(queries, q, scale):
    q, scale = queries(q, scale)
    bits = q.to(tl.uint16, bitcast=True) & 0xFF80  # as e4m3 has them
    return bits.to(tl.float16, bitcast=True), scale


@pytest.mark.parametrize("fault", [_one_scale, _bits_lost])
def test_wrong_queries_are_found(fault, monkeypatch):
    executor, problem = long_and_short()
    check(executor, problem)
    queries, called = block_loop.scaled_queries, []

    def faulty(*args):
        called.append(True)
        return fault(queries, *args)

    monkeypatch.setattr(block_loop, "scaled_queries", faulty)
    with pytest.raises(AssertionError):
        check(executor, problem)
    assert called


def test_values_of_a_row_alone_without_their_scale_are_found(monkeypatch):
    """That of items that are run row by row, because one of them sees a NaN."""
    executor, problem = long_and_short()
    bad = poisoned(problem, Poison("v", float("nan"), 1, lambda n: n - 1))
    out, _ = run(executor, bad)
    assert_contained(problem, bad, out)
    monkeypatch.setattr(row_alone, "is_narrow", lambda dtype: False)
    out, _ = run(executor, bad)
    with pytest.raises(AssertionError):
        assert_contained(problem, bad, out)


@pytest.mark.parametrize("strategy", ["calibrated", "naive"])
@pytest.mark.parametrize("scales", [{"k_scale": 1.0}, {"v_scale": 1.0}, {"v_scale": 2.6**2}])
def test_a_wrong_scale_is_found(scales, strategy):
    executor, problem = long_and_short(strategy)
    check(executor, problem)
    layer = problem.layer
    problem.layer = lambda out, **changed: layer(out, **changed, **scales)
    with pytest.raises(AssertionError):
        check(executor, problem)
