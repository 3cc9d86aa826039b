"""Kernels against attention in float64 and the plan's interpreter, over poisoned memory.

On a GPU at the sizes of real models. tests/cpu/test_kernels_interpreted.py runs the same file in
Triton's interpreter, on small trees and tiles: what only a GPU can show is skipped there.
"""

import math
import os

import pytest
import torch

from sgl_prefix_attn.execute import reference
from sgl_prefix_attn.execute.backends.choice import why_no_row_tiles
from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend
from sgl_prefix_attn.execute.backends.triton_backend import TritonBackend
from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.plan import STRATEGIES
from sgl_prefix_attn.records import HeadConfig
from tests.support import forests, gpu_problems, plan_faults
from tests.support.forests import path_table, random_paths, splitting_tiles
from tests.support.gpu_problems import LLAMA, TREES
from tests.support.plan_faults import FAULTS
from tests.support.problems import assert_attention, make_problem
from tests.support.running import (
    append,
    executor,
    load,
    loaded,
    plan_wrapper,
    run,
    wrapper_of,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
only_on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter runs no CTAs")
FP16 = torch.float16
if INTERPRETED:
    DEVICE, SMALL = "cpu", HeadConfig(8, 2, 32)  # up to 4 tails in a tile
    DTYPES = [FP16, torch.float32]  # bf16 products are wrong in the interpreter
    USUAL = {
        "small": lambda: random_paths(2, 3, 7, lengths=(1, 16, 40, 65)),
        "large": lambda: random_paths(3, 10, 7, lengths=(1, 16, 40, 65)),
    }
    HEADS = [
        HeadConfig(1, 1, 16), HeadConfig(7, 1, 32), HeadConfig(28, 4, 32), HeadConfig(10, 2, 80),
        HeadConfig(4, 4, 96), HeadConfig(16, 1, 256), HeadConfig(6, 2, 128),
    ]  # fmt: skip
else:
    DEVICE, SMALL = gpu_problems.DEVICE, LLAMA
    DTYPES = [FP16, torch.bfloat16]
    USUAL = TREES
    HEADS = [
        LLAMA, HeadConfig(64, 8, 128), HeadConfig(16, 8, 128), HeadConfig(32, 32, 128),
        HeadConfig(28, 4, 128), HeadConfig(7, 1, 128), HeadConfig(32, 8, 64),
        HeadConfig(32, 8, 80), HeadConfig(32, 8, 256), HeadConfig(28, 4, 64),
    ]  # fmt: skip
FIRST = next(iter(USUAL))
MANY_TILES = {
    "nodes": [(-1, 20), (-1, 31), (-1, 33), (-1, 64), (-1, 129)],
    "leaf": [0] * 2 + [1] * 5 + [2] * 4 + [3] * 7 + [4] * 19 + [-1] * 5,
    "tails": [1 + (37 * i) % 64 for i in range(39)] + [150, 65, 1],
}


def problem_of(paths, heads=SMALL, dtype=DTYPES[-1], **options):
    return make_problem(paths, heads, dtype, device=DEVICE, **options)


def planned(paths, heads=SMALL, strategy=None, **options):
    """(plan, tiles): a server's on a GPU, small ones in the interpreter."""
    if INTERPRETED:
        packed = options.pop("packed", True)
        made = forests.planner(heads, strategy or "naive", packed=packed, **options)
    else:
        made = gpu_problems.planner(heads, strategy or "calibrated", **options)
    return made.plan(paths), made.tile_set


def check(problem, made, interpreter=INTERPRETED):
    """float64 attention, tickets that are back at 0, and what the plan's interpreter makes of the
    words and indices that are on the device."""
    out, lse = run(made, problem)
    assert made.workspace.tickets.eq(0).all(), "the next forward starts from ticket 0"
    assert_attention(problem, out, lse)
    if interpreter:
        words, indices = made.workspace.words.cpu(), made.workspace.kv_indices.cpu()
        want, want_lse = reference.execute(
            words, problem.q.cpu(), problem.k.cpu(), problem.v.cpu(), indices,
            problem.seq_lens.cpu(), sm_scale=problem.sm_scale, logits_soft_cap=problem.soft_cap,
        )  # fmt: skip
        # Float32 sums in another order; a GPU's exp2 and log2 are those of its special function
        # unit; half precision rounds probabilities and results (values up to about 4).
        if INTERPRETED:
            lse_atol, atol = 1e-5, 4e-6 if problem.dtype == torch.float32 else 4e-3
        else:
            lse_atol, atol = 2e-4, torch.finfo(problem.dtype).eps * want.abs().max().item()
        torch.testing.assert_close(lse.cpu(), want_lse.values, rtol=0, atol=lse_atol)
        torch.testing.assert_close(out.cpu().float(), want.float(), rtol=0, atol=atol)
    return out


def check_plan(problem, plan_and_tiles, **options):
    plan, tiles = plan_and_tiles
    check(problem, loaded(problem, plan, tiles=tiles), **options)


@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_head_configurations(heads, dtype):
    paths = random_paths(3, 6, 5, lengths=(1, 17, 40)) if INTERPRETED else TREES["mixed"]()
    check_plan(problem_of(paths, heads, dtype), planned(paths, heads))


@only_on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tree", "soft_cap"), [*((tree, 0.0) for tree in TREES), ("mixed", 5.0), ("mixed", 30.0)]
)
def test_trees(tree, soft_cap, dtype):
    paths = TREES[tree]()
    compared = ("mixed", "deep", "forty_roots", "unshared_37", "random")
    problem = problem_of(paths, dtype=dtype, soft_cap=soft_cap)
    check_plan(problem, planned(paths), interpreter=tree in compared)


@pytest.mark.parametrize(
    "tree", ["large"] if INTERPRETED else ["mixed", "deep", "forty_roots", "unshared_37"]
)
@pytest.mark.parametrize("strategy", ["query", "calibrated"] if INTERPRETED else STRATEGIES)
def test_strategies(strategy, tree):
    paths = USUAL[tree]()
    check_plan(problem_of(paths), planned(paths, strategy=strategy))


@pytest.mark.parametrize(("dtype", "soft_cap"), [(DTYPES[0], 5.0), (DTYPES[1], 0.0)], ids=str)
@pytest.mark.parametrize("heads", [SMALL] if INTERPRETED else [LLAMA, HeadConfig(28, 4, 64)])
def test_every_tile_at_once(heads, dtype, soft_cap):
    """A set of small tiles on which short KV uses every mechanism: several row tiles and block_n,
    single and packed tails of unlike lengths, splits, direct writes."""
    paths = path_table(**MANY_TILES)
    tiles = splitting_tiles(heads)
    plan = forests.planner(heads, "naive").plan(paths)
    used = (plan.words[L.H_QUEUES + 1 : L.HEADER_WORDS : 2][: len(tiles.tiles)] > 0).sum()
    assert used == len(tiles.tiles)
    check_plan(problem_of(paths, heads, dtype, soft_cap=soft_cap), (plan, tiles))


@pytest.mark.parametrize("strategy", ["naive"] if INTERPRETED else STRATEGIES)
@pytest.mark.parametrize("packed", [True, False])
def test_appends_without_a_new_plan(strategy, packed):
    """Many items of every kind, and splits of 16 tokens."""
    chosen = path_table([(-1, 40)], [0, 0, 0, -1, -1], [15, 16, 1, 63, 31])
    paths = chosen if INTERPRETED else TREES["random"]()
    problem = problem_of(paths, dtype=DTYPES[0])
    plan = forests.planner(SMALL, strategy, headroom=18, packed=packed).plan(paths)
    made = loaded(problem, plan, tiles=splitting_tiles(SMALL, packed))
    generator = torch.Generator().manual_seed(5)
    for step in range(18):
        append(made, problem, problem.grow(generator))
        if step in ((0, 1, 17) if INTERPRETED else (17,)):
            check(problem, made, interpreter=True)
    problem.grow(generator)
    with pytest.raises(AssertionError):  # it was not appended
        check(problem, made)


@only_on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_finds_a_planted_fault(fault, dtype):
    problem = problem_of(plan_faults.tree(), dtype=dtype)
    plan = forests.planner(SMALL, "naive").plan(problem.paths)
    check_plan(problem, (plan, splitting_tiles(SMALL)))
    fault(plan)
    made = loaded(problem, plan, tiles=splitting_tiles(SMALL))
    append(made, problem, problem.grow(torch.Generator().manual_seed(0)))  # some change its slot
    out, lse = run(made, problem)
    for found in ((out,), (out, lse)):
        with pytest.raises(AssertionError):
            assert_attention(problem, *found)


def test_plans_follow_each_other_on_one_workspace():
    """Each after a larger or smaller one, none synchronised; the first again bit for bit."""
    names = USUAL if INTERPRETED else ("mixed", "one_token", "one_root_113", "deep")
    problems = [problem_of(USUAL[name](), seed=i) for i, name in enumerate(names)]
    plans = [planned(problem.paths)[0] for problem in problems]
    made = executor(problems[0], *plans, tiles=planned(problems[0].paths)[1])
    results = []
    for i in (*range(len(plans)), 0):
        load(made, problems[i], plans[i])
        results.append(run(made, problems[i])[0])
    assert torch.equal(results[0], results[-1])
    for result, problem, plan in zip(
        results[1:], problems[1:] + problems[:1], plans[1:] + plans[:1], strict=True
    ):
        load(made, problem, plan)
        assert torch.equal(check(problem, made, interpreter=True), result)


def test_two_layers_run_on_one_plan():
    paths = USUAL[FIRST]()
    plan, tiles = planned(paths)
    problem = problem_of(paths)
    made = loaded(problem, plan, tiles=tiles)
    check(problem, made)
    # the same slots, other values
    problem.k, problem.v = problem.k.flip(-1), problem.v.roll(1, dims=-1)
    check(problem, made)


@only_on_a_gpu
def test_long_kv_is_split_and_many_queries_take_several_row_tiles():
    paths = path_table([(-1, 20_011)], [0, 0], [13_001, 5])
    plan, tiles = planned(paths)
    assert plan.num_partials > 8
    check_plan(problem_of(paths), (plan, tiles))
    paths = path_table([(-1, 333)], [0] * 600, [1 + i % 9 for i in range(600)])
    check_plan(problem_of(paths), planned(paths))


@pytest.mark.parametrize("scale", [3e4, 1e-4])
def test_values_at_both_ends_of_float16(scale):
    """Partial results are float16 for half-precision models, scaled row by row: values near its
    largest number, or among its subnormal ones, lose nothing by it."""
    paths = path_table([(-1, 70)], [0, 0, -1], [20, 33, 80]) if INTERPRETED else TREES["mixed"]()
    problem = problem_of(paths, dtype=FP16)
    problem.v = (problem.v.float() / 8 * scale).half()
    plan, tiles = planned(paths)
    assert_attention(problem, *run(loaded(problem, plan, tiles=tiles), problem))


def test_strided_tensors_and_no_lse():
    """q, out and caches may be slices of larger tensors: only the last two dimensions are dense.
    Without an LSE, the library's default, nothing else changes."""
    paths = USUAL[FIRST]()
    problem = problem_of(paths)
    plan, tiles = planned(paths)
    made = loaded(problem, plan, tiles=tiles)
    want, _ = run(made, problem)
    dense = torch.full_like(problem.q, math.nan)
    made.run(problem.layer(dense))
    assert torch.equal(dense, want)
    both = torch.stack([problem.k, problem.v], dim=1)  # [slots, 2, Hkv, D]
    q = torch.stack([torch.full_like(problem.q, math.nan), problem.q], dim=1)
    out = torch.full_like(q, math.nan)
    made.run(problem.layer(out[:, 0], q=q[:, 1], k_cache=both[:, 0], v_cache=both[:, 1]))
    assert torch.equal(out[:, 0], want) and out[:, 1].isnan().all()


# --- the device queue ----------------------------------------------------------------------------


@only_on_a_gpu
def test_runs_are_bit_identical():
    """CTAs take items in another order every time; the merge order is the plan's, whether tiles
    run side by side or one after the other."""
    paths = TREES["mixed"]()
    problem = problem_of(paths)
    plan, _ = planned(paths)
    first = None
    for parallel_tiles in (True, False):
        made = loaded(problem, plan, parallel_tiles=parallel_tiles)
        for _ in range(20):
            again = run(made, problem)
            first = first or again
            assert all(map(torch.equal, first, again))


@only_on_a_gpu
def test_runs_back_to_back_do_not_meet():
    """Many forwards in flight at once, on outputs of their own: tickets and partial rows of one
    must not reach the next."""
    paths = TREES["deep"]()
    problem = problem_of(paths)
    made = loaded(problem, planned(paths, strategy="naive")[0])
    want, _ = run(made, problem)
    outs = [torch.full_like(problem.q, math.nan) for _ in range(64)]
    for out in outs:
        made.run(problem.layer(out))
    assert all(torch.equal(out, want) for out in outs)
    assert made.workspace.tickets.eq(0).all()


# --- PrefixDecodeWrapper, with its own tiles and costs -------------------------------------------

KERNELS = ["triton"] if INTERPRETED else ["triton", "row_tiles"]


def wrapper_over(kernels, problem, **options):
    if kernels == "row_tiles":
        why_not = why_no_row_tiles(problem.q.device, problem.heads, problem.dtype)
        if why_not is not None:
            pytest.skip(f"no row tiles here: {why_not}")
        by_itself = wrapper_of(problem, **options)
        assert isinstance(by_itself._executor.backend, GluonBackend)
    return wrapper_of(problem, kernels=kernels, **options)


def check_wrapper(made, problem, kernels):
    backend = TritonBackend if kernels == "triton" else GluonBackend
    assert isinstance(made._executor.backend, backend)
    out, lse = made.run(problem.q, (problem.k, problem.v), return_lse=True)
    assert lse.base == "2"
    assert_attention(problem, out, lse.values)
    given = torch.full_like(problem.q, math.nan)
    assert made.run(problem.q, (problem.k, problem.v), out=given) is given
    assert torch.equal(given, out)


@only_on_a_gpu
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_wrapper_on_a_block_table(page_size, dtype, kernels):
    nodes = [(-1, 512), (0, 128), (0, 64), (-1, 192)]
    leaf = [1] * 5 + [2] * 4 + [0] * 3 + [3] * 2 + [-1] * 3
    paths = path_table(nodes, leaf, [1, 63, 64, 65, 200] + [1 + 41 * i % 130 for i in range(12)])
    problem = problem_of(paths, dtype=dtype, page_size=page_size)
    made = wrapper_over(kernels, problem, page_size=page_size)
    table = problem.req_to_token[problem.pool][:, ::page_size] // page_size
    made.plan_block_table(table, problem.seq_lens.cpu())
    assert made.explain()["num_nodes"] >= 4
    check_wrapper(made, problem, kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("soft_cap", [0.0] if INTERPRETED else [0.0, 30.0])
def test_wrapper_on_paths_over_appends(soft_cap, kernels):
    """Batches of other sizes follow each other: the workspace grows, and an earlier plan's words
    never show through."""
    made = None
    for name in USUAL if INTERPRETED else ("batch_1", "mixed", "one_token", "one_root_113", "deep"):
        problem = problem_of(USUAL[name](), dtype=DTYPES[0], soft_cap=soft_cap)
        made = made or wrapper_over(kernels, problem)
        check_wrapper(plan_wrapper(made, problem), problem, kernels)
        generator = torch.Generator().manual_seed(1)
        for step in range(18 if name == "mixed" else 1):
            made.append(problem.grow(generator))
            if step in (0, 15, 17):
                check_wrapper(made, problem, kernels)


@only_on_a_gpu
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("tree", ["mixed", "deep", "one_token"])
def test_a_captured_wrapper_serves_later_plans(tree, kernels):
    """Append and three layers with LSE are one graph, which replays over a plan made later."""
    problem = problem_of(TREES[tree]())
    made = plan_wrapper(wrapper_over(kernels, problem), problem)
    q = torch.full_like(problem.q, math.nan)
    cache_loc = torch.zeros(len(q), dtype=torch.int64, device=DEVICE)
    k, v = problem.k, problem.v

    def step():
        made.append(cache_loc)
        return [made.run(q, kv, return_lse=True) for kv in ((k, v), (v, k), (k, v))]

    step()  # compiles, outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, _, last = step()
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        plan_wrapper(made, problem)
        cache_loc.copy_(problem.grow(generator))
        q.copy_(problem.q)
        graph.replay()
        for out, lse in (first, last):
            assert_attention(problem, out, lse.values)
