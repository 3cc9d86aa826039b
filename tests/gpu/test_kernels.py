"""Kernels on the GPU against full attention in float64, over poisoned memory."""

import math

import pytest
import torch

from sgl_prefix_attn import PrefixDecodeWrapper
from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.plan import STRATEGIES
from sgl_prefix_attn.records import HeadConfig
from tests.support import gpu_problems
from tests.support.forests import chain, path_table, splitting_tiles
from tests.support.gpu_problems import LLAMA, TREES, gpu_problem, grow, loaded, planner, run
from tests.support.problems import assert_attention

BF16, FP16 = torch.bfloat16, torch.float16
HEADS = [
    LLAMA,
    HeadConfig(64, 8, 128),
    HeadConfig(16, 8, 128),
    HeadConfig(32, 32, 128),
    HeadConfig(28, 4, 128),
    HeadConfig(7, 1, 128),
    HeadConfig(32, 8, 64),
    HeadConfig(32, 8, 80),
    HeadConfig(32, 8, 256),
    HeadConfig(28, 4, 64),
]


def heads_id(heads):
    return f"{heads.num_qo_heads}/{heads.num_kv_heads}x{heads.head_dim}"


def check(problem, plan, **options):
    made = loaded(problem, plan, **options)
    assert_attention(problem, *run(made, problem))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=heads_id)
def test_head_configurations(heads, dtype):
    paths = TREES["mixed"]()
    check(gpu_problem(paths, heads, dtype), planner(heads).plan(paths))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("tree", TREES)
def test_trees(tree, dtype):
    paths = TREES[tree]()
    check(gpu_problem(paths, dtype=dtype), planner().plan(paths))


@pytest.mark.parametrize("tree", ["mixed", "deep", "forty_roots", "unshared_37"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy, tree):
    paths = TREES[tree]()
    check(gpu_problem(paths), planner(strategy=strategy).plan(paths))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("soft_cap", [5.0, 30.0])
def test_soft_cap(soft_cap, dtype):
    paths = TREES["mixed"]()
    check(gpu_problem(paths, dtype=dtype, soft_cap=soft_cap), planner().plan(paths))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("heads", [LLAMA, HeadConfig(28, 4, 64)], ids=heads_id)
def test_every_tile_at_once(heads, dtype):
    """A set of small tiles on which short KV uses every mechanism: several row tiles and block_n,
    single and packed tails of unlike lengths, splits, direct writes."""
    nodes = [(-1, 20), (-1, 31), (-1, 33), (-1, 64), (-1, 129)]
    leaf = [0] * 2 + [1] * 5 + [2] * 4 + [3] * 7 + [4] * 19 + [-1] * 5
    tails = [1 + (37 * i) % 64 for i in range(len(leaf) - 3)] + [150, 65, 1]
    paths = path_table(nodes, leaf, tails)
    tiles = splitting_tiles(heads)
    plan = planner(heads, "naive", tiles).plan(paths)
    queues = plan.words[L.H_QUEUES + 1 : L.HEADER_WORDS : 2]
    assert (queues[: len(tiles.tiles)] > 0).sum() >= len(tiles.tiles) - 1
    check(gpu_problem(paths, heads, dtype), plan, tiles=tiles)


def test_long_kv_is_split():
    paths = path_table([(-1, 20_011)], [0, 0], [13_001, 5])
    plan = planner().plan(paths)
    assert plan.num_partials > 8
    check(gpu_problem(paths), plan)


def test_queries_beyond_the_largest_tile():
    """600 requests under one node: several row tiles read it."""
    paths = path_table([(-1, 333)], [0] * 600, [1 + i % 9 for i in range(600)])
    check(gpu_problem(paths), planner().plan(paths))


def test_without_lse_nothing_else_changes():
    paths = TREES["mixed"]()
    problem = gpu_problem(paths)
    made = loaded(problem, planner().plan(paths))
    want, _ = run(made, problem)
    out = torch.full_like(problem.q, math.nan)
    made.run(problem.layer(out))
    assert torch.equal(out, want)


def test_strided_tensors():
    """q, out and caches as slices of larger tensors: only the last two dimensions are dense."""
    paths = TREES["mixed"]()
    problem = gpu_problem(paths)
    made = loaded(problem, planner().plan(paths))
    want, _ = run(made, problem)
    both = torch.stack([problem.k, problem.v], dim=1)
    q = torch.stack([torch.full_like(problem.q, math.nan), problem.q], dim=1)
    out = torch.full_like(q, math.nan)
    made.run(problem.layer(out[:, 0], q=q[:, 1], k_cache=both[:, 0], v_cache=both[:, 1]))
    assert torch.equal(out[:, 0], want) and out[:, 1].isnan().all()


@pytest.mark.parametrize("scale", [3e4, 1e-4])
def test_values_beyond_plain_half_precision_partials(scale):
    paths = TREES["mixed"]()
    problem = gpu_problem(paths, dtype=FP16)
    problem.v = (problem.v.float() / 8 * scale).half()
    check(problem, planner().plan(paths))


def wrapper_of(problem, page_size=1, **options):
    heads = problem.heads
    return PrefixDecodeWrapper(
        heads.num_qo_heads, heads.num_kv_heads, heads.head_dim, page_size=page_size,
        device=gpu_problems.DEVICE, dtype=problem.dtype, sm_scale=problem.sm_scale,
        logits_soft_cap=problem.soft_cap, **options,
    )  # fmt: skip


def check_wrapper(wrapper, problem):
    out, lse = wrapper.run(problem.q, (problem.k, problem.v), return_lse=True)
    assert lse.base == "2"
    assert_attention(problem, out, lse.values)
    given = torch.full_like(problem.q, math.nan)
    assert wrapper.run(problem.q, (problem.k, problem.v), out=given) is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_wrapper_on_a_block_table(page_size, dtype):
    nodes = [(-1, 512), (0, 128), (0, 64), (-1, 192)]
    leaf = [1] * 5 + [2] * 4 + [0] * 3 + [3] * 2 + [-1] * 3
    paths = path_table(nodes, leaf, [1, 63, 64, 65, 200] + [1 + 41 * i % 130 for i in range(12)])
    problem = gpu_problem(paths, dtype=dtype, page_size=page_size)
    wrapper = wrapper_of(problem, page_size)
    table = problem.req_to_token[problem.pool][:, ::page_size] // page_size
    wrapper.plan_block_table(table, problem.seq_lens.cpu())
    assert wrapper.explain()["num_nodes"] >= 4
    check_wrapper(wrapper, problem)


@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
def test_wrapper_on_paths_over_appends(soft_cap):
    paths = TREES["mixed"]()
    problem = gpu_problem(paths, soft_cap=soft_cap)
    wrapper = wrapper_of(problem)
    known = [[(node, int(paths.length[node])) for node in chain(paths, i)] for i in range(37)]
    wrapper.plan(known, problem.seq_lens.cpu(), problem.req_to_token, problem.pool.cpu())
    check_wrapper(wrapper, problem)
    generator = torch.Generator().manual_seed(1)
    for step in range(18):
        wrapper.append(grow(problem, generator))
        if step in (0, 15, 17):
            check_wrapper(wrapper, problem)


def test_wrapper_follows_batches_of_other_sizes():
    """Workspace grows and shrinks with the plans; an earlier plan's words never show through."""
    wrapper = None
    for name in ("batch_1", "mixed", "one_token", "one_root_113", "deep"):
        paths = TREES[name]()
        problem = gpu_problem(paths)
        wrapper = wrapper or wrapper_of(problem)
        rows = range(paths.leaf.size)
        known = [[(node, int(paths.length[node])) for node in chain(paths, i)] for i in rows]
        wrapper.plan(known, problem.seq_lens.cpu(), problem.req_to_token, problem.pool.cpu())
        check_wrapper(wrapper, problem)
