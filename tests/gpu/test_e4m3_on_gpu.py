"""KV caches of float8_e4m3fn, on either family's kernel of a GPU: every cut against full attention
in float64."""

from __future__ import annotations

import pytest
import torch

from sgl_prefix_attn.execute.backends.choice import why_no_backend, why_no_hopper
from sgl_prefix_attn.execute.backends.family import HOPPER
from sgl_prefix_attn.execute.backends.new_kv import store_narrow
from sgl_prefix_attn.execute.self_test import check_kernels, self_test_paths
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.records import HeadConfig
from tests.support.gpu_problems import DEVICE, TREES, gpu_problem
from tests.support.kernels import FAMILIES, planner_of, served_backend
from tests.support.poison import POISONS, assert_contained, forest, poisoned
from tests.support.problems import E4M3, assert_attention
from tests.support.running import append, executor_of, load, run
from tests.support.sinks import sinks_of

BOTH = pytest.mark.parametrize("family", FAMILIES)
GROWTH = 20
SHAPES = {
    "llama": (HeadConfig(32, 8, 128), torch.bfloat16, 0.0),
    "qwen-7": (HeadConfig(28, 4, 128), torch.bfloat16, 0.0),
    "mha": (HeadConfig(8, 8, 64), torch.bfloat16, 0.0),
    "group-16": (HeadConfig(32, 2, 128), torch.bfloat16, 20.0),
    # these the portable kernel runs everywhere
    "float16": (HeadConfig(6, 2, 64), torch.float16, 30.0),
    "gemma": (HeadConfig(16, 8, 256), torch.bfloat16, 50.0),
}


def backend_for(family, heads, dtype):
    device = torch.device(DEVICE)
    why_not = why_no_hopper if family == HOPPER else why_no_backend
    if (reason := why_not(device, heads, dtype, E4M3)) is not None:
        pytest.skip(f"no {family} kernels here: {reason}")
    return served_backend(family, heads, dtype)


def plans_of(backend, paths):
    """The fastest cut, and one that is split where any is."""
    made, tree = planner_of(backend, headroom=GROWTH), build_forest(paths)
    cuts = sorted(made.cuts(tree), key=lambda cut: cut.us)
    split = [cut for cut in cuts[1:] if cut.parts.max(initial=1) > 1]
    return [made.serialize(tree, cut) for cut in (cuts[0], *split[-1:])]


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tree", TREES)
def test_trees_through_growth(tree, shape, family):
    heads, dtype, soft_cap = SHAPES[shape]
    backend, paths = backend_for(family, heads, dtype), TREES[tree]()
    for plan in plans_of(backend, paths):
        problem = gpu_problem(paths, heads, dtype, kv_dtype=E4M3, soft_cap=soft_cap)
        if shape == "mha":
            problem.sinks = sinks_of(heads, DEVICE)
        made = executor_of(backend, problem, plan)
        load(made, problem, plan)
        assert_attention(problem, *run(made, problem))
        generator = torch.Generator().manual_seed(7)
        for _ in range(3):
            append(made, problem, problem.grow(generator))
        out, lse = run(made, problem)
        assert_attention(problem, out, lse)
        again, _ = run(made, problem)
        assert torch.equal(out, again), "two runs differ"


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in POISONS if "infinite" not in name])
def test_a_nan_stays_with_its_requests(name, shape, family):
    heads, dtype, soft_cap = SHAPES[shape]
    backend = backend_for(family, heads, dtype)
    problem = gpu_problem(forest(2000), heads, dtype, kv_dtype=E4M3, soft_cap=soft_cap)
    bad = poisoned(problem, POISONS[name])
    for plan in plans_of(backend, problem.paths):
        made = executor_of(backend, bad, plan)
        load(made, bad, plan)
        assert_contained(problem, bad, *run(made, bad))


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
def test_the_self_test_passes(shape, family):
    heads, dtype, soft_cap = SHAPES[shape]
    backend = backend_for(family, heads, dtype)
    made, tree = planner_of(backend, headroom=2), build_forest(self_test_paths())
    plans = [made.serialize(tree, cut) for cut in made.cuts(tree)]
    check_kernels(backend, plans, soft_cap, E4M3)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.7, 1.7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_new_tokens_are_the_bits_that_torch_makes(dtype, scales):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8_e4m3fn here")
    packed = torch.randn(37, 16 * 256, device=DEVICE).mul_(4).to(dtype)
    k, v = (half.view(37, 16, 128) for half in packed.chunk(2, 1))
    caches = [torch.zeros(64, 16, 128, dtype=E4M3, device=DEVICE) for _ in scales]
    slots = torch.stack([torch.randperm(64, device=DEVICE)[:37]] * 3, dim=1)[:, 0]
    store_narrow(k, v, *caches, slots, *scales)
    for new, cache, scale in zip((k, v), caches, scales, strict=True):
        divided = new.clone().div_(torch.tensor(scale, device=DEVICE)).to(E4M3)
        assert torch.equal(cache[slots].view(torch.uint8), divided.view(torch.uint8))
