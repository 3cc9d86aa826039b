"""Caches of float8_e4m3fn, run in torch: attention over what they hold times their scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table, planner, random_paths
from tests.support.interpreter_process import run_interpreted
from tests.support.poison import POISONS, assert_contained, forest, poisoned
from tests.support.problems import E4M3, assert_attention, attend, make_problem
from tests.support.running import append, loaded, planned_wrapper, run
from tests.support.sinks import sinks_of

BITS, RANGES = HeadConfig(8, 2, 64), HeadConfig(2, 2, 64)  # keys of bits and of rows
PATHS = path_table([(-1, 700), (0, 70)], [1, 1, 0, 0, -1], [1, 63, 64, 5, 900])
# e4m3 has a NaN and no infinity
NOT_NUMBERS = [name for name in POISONS if "infinite" not in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "paths", "strategy", "soft_cap"),
    [
        (BITS, PATHS, "naive", 0.0),
        (RANGES, PATHS, "calibrated", 3.0),
        (HeadConfig(7, 1, 128), random_paths(37, 37, 12), "pat", 0.0),
        (BITS, path_table([(-1, 4097)], [0, 0, -1], [1, 63, 1]), "naive", 5.0),
    ],
)
def test_through_growth(heads, paths, strategy, soft_cap, dtype):
    problem = make_problem(paths, heads, dtype, kv_dtype=E4M3, soft_cap=soft_cap)
    problem.sinks = sinks_of(heads)
    made = loaded(problem, planner(heads, strategy).plan(paths))
    assert_attention(problem, *run(made, problem))
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        append(made, problem, problem.grow(generator))
    assert_attention(problem, *run(made, problem))


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_the_ground_truth_is_attention_over_the_dequantised_cache(soft_cap):
    problem = make_problem(PATHS, BITS, torch.bfloat16, kv_dtype=E4M3, soft_cap=soft_cap)
    rows = problem.req_to_token, problem.pool, problem.seq_lens
    options = {"sm_scale": problem.sm_scale, "logits_soft_cap": soft_cap}
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    out, lse = full_attention(problem.q, problem.k, problem.v, *rows, **options, **scales)
    k, v = problem.k.double() * problem.k_scale, problem.v.double() * problem.v_scale
    want, want_lse = full_attention(problem.q, k, v, *rows, **options)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse.values, want_lse.values, rtol=1e-12, atol=1e-12)
    row, _ = attend(problem, 1, problem.slots()[1], torch.float64)
    torch.testing.assert_close(out[1], row, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [BITS, RANGES], ids=str)
@pytest.mark.parametrize("name", NOT_NUMBERS)
def test_a_nan_stays_with_the_requests_that_see_it(name, heads):
    problem = make_problem(forest(), heads, torch.bfloat16, kv_dtype=E4M3)
    bad = poisoned(problem, POISONS[name])
    for plan in (
        Planner(heads, num_sms=16).plan(problem.paths),
        planner(heads, "naive").plan(problem.paths),
    ):
        assert_contained(problem, bad, *run(loaded(bad, plan), bad))


FAULTS = {
    "keys without their scale": lambda layer: replace(layer, k_scale=1.0),
    "values without their scale": lambda layer: replace(layer, v_scale=1.0),
    "scales that are swapped": lambda layer: replace(
        layer, k_scale=layer.v_scale, v_scale=layer.k_scale
    ),
    "a scale behind the cap": lambda layer: replace(layer, soft_cap=layer.soft_cap * layer.k_scale),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_scale_is_found(fault):
    problem = make_problem(PATHS, BITS, torch.bfloat16, kv_dtype=E4M3, soft_cap=3.0)
    made = loaded(problem, planner(BITS, "naive").plan(PATHS))
    out = torch.empty_like(problem.q)
    made.run(problem.layer(out))
    assert_attention(problem, out)
    made.run(FAULTS[fault](problem.layer(out)))
    with pytest.raises(AssertionError):
        assert_attention(problem, out)


def test_the_wrapper_reads_them():
    problem = make_problem(PATHS, BITS, torch.bfloat16, kv_dtype=E4M3)
    made = planned_wrapper(problem, kv_dtype=E4M3)
    caches, scales = (problem.k, problem.v), (problem.k_scale, problem.v_scale)
    out, lse = made.run(problem.q, caches, None, True, None, *scales)
    assert_attention(problem, out, lse.values)
    with pytest.raises(AssertionError):
        assert_attention(problem, made.run(problem.q, caches))
    with pytest.raises(ValueError, match=r"kv_cache\[0\] must have the wrapper's kv_dtype"):
        made.run(problem.q, (problem.k.bfloat16(), problem.v))
    for scale in (0, -0.5):  # of logits that are masked already
        with pytest.raises(ValueError, match=f"k_scale must be positive, got {scale:.1f}"):
            made.run(problem.q, caches, k_scale=scale)


@pytest.mark.long
def test_the_portable_kernel_in_the_interpreter():
    run_interpreted("interpreted_e4m3.py")
