"""A value that is no number stays with the requests that see it, on a GPU."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from triton.experimental import gluon

from sgl_prefix_attn.execute.backends.choice import why_no_hopper
from sgl_prefix_attn.kernels.hopper import cleaning
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.gpu.test_kernels import SHAPES, Runner, cuts_of, layer_of
from tests.support.forests import path_table
from tests.support.gpu_problems import DEVICE, TREES, gpu_problem
from tests.support.multi_token import multi_token
from tests.support.poison import CAPPED, NAN, POISONS, Poison, assert_contained, forest, poisoned

# head dims 64, 128 and 256, keys of bits and of ranges, with a cap and without
MOST = ("llama", "qwen-7", "mha", "group-3", "gemma", "gemma-7", "gemma-mha")


@pytest.fixture(autouse=True)
def _hopper():
    if why_no_hopper(torch.device(DEVICE), SHAPES["llama"][0], torch.bfloat16) is not None:
        pytest.skip("the row-tile kernel is for sm_90")


def check(problem, poison, *, paths=None, pdl=False):
    """Every cut of the paths, twice in the same memory, with `poison` in the problem."""
    bad = poisoned(problem, poison)
    parts = set()
    for plan in cuts_of(paths or problem.paths, problem.heads):
        parts.add(plan.stats.num_partials > 0)
        runner = Runner(bad, plan, pdl=pdl)
        out, lse = runner.run()
        assert_contained(problem, bad, out, lse)
        again, again_lse = runner.run()
        assert torch.equal(out.nan_to_num(7.0), again.nan_to_num(7.0)), "two runs differ"
        assert torch.equal(lse.nan_to_num(7.0), again_lse.nan_to_num(7.0))
    return parts


@pytest.mark.parametrize(
    ("shape", "name"),
    [(shape, name) for shape in MOST for name in (CAPPED if SHAPES[shape][2] else POISONS)],
)
def test_requests_that_do_not_see_it_are_not_hit(name, shape):
    heads, dtype, soft_cap = SHAPES[shape]
    problem = gpu_problem(forest(2000), heads, dtype, soft_cap=soft_cap)
    parts = check(problem, POISONS[name], pdl=name.startswith("private"))
    assert parts == {False, True}, "tiles that are split, and that are not"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_request_of_64(head_dim):
    """A shared root, and NaN in what request 5 alone sees: its own V."""
    paths = path_table([(-1, 2048)], [0] * 64, [100 + i for i in range(64)])
    problem = gpu_problem(paths, HeadConfig(16, 8, head_dim), torch.bfloat16)
    check(problem, Poison("v", NAN, 5, lambda n: n - 1))


@pytest.mark.parametrize("shape", ["llama", "mha", "gemma"])
@pytest.mark.parametrize("tree", ["mixed", "forty_roots", "unshared_37", "random"])
def test_other_items_of_the_same_cta(tree, shape):
    """Trees of many tiles: several a CTA, of one warpgroup and of two."""
    heads, dtype, soft_cap = SHAPES[shape]
    problem = gpu_problem(TREES[tree](), heads, dtype, soft_cap=soft_cap)
    for request in (0, 5, len(problem.q) - 1):
        check(problem, Poison("v", NAN, request, lambda n: n - 1))


def test_a_request_whose_query_is_not_finite_either():
    """What a layer makes of a hidden state of NaN."""
    heads, dtype, _ = SHAPES["llama"]
    problem = gpu_problem(TREES["mixed"](), heads, dtype)
    bad = poisoned(problem, Poison("v", NAN, 5, lambda n: n - 1))
    slot = bad.last_slots()[5]
    bad.q = bad.q.clone()
    bad.q[5], bad.k[slot], bad.v[slot] = NAN, NAN, NAN
    for plan in cuts_of(problem.paths, heads):
        assert_contained(problem, bad, *Runner(bad, plan).run())


@pytest.mark.parametrize("shape", ["llama", "group-3", "gemma"])
@pytest.mark.parametrize("cache", ["k", "v"])
def test_a_token_that_later_tokens_of_its_request_see(cache, shape):
    heads, dtype, soft_cap = SHAPES[shape]
    asked = multi_token(
        forest(1000), [4, 1, 9, 1, 1, 33, 2, 1, 5], heads, dtype, soft_cap=soft_cap, device=DEVICE
    )
    newest = int(asked.query_lens[:6].sum()) - 1
    bad = poisoned(asked.queries, Poison(cache, NAN, newest, lambda n: n - 5))
    tree = build_forest(asked.requests.paths, asked.query_lens)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    planner = Planner(heads, num_sms=num_sms)
    cuts = sorted(planner.cuts(tree), key=lambda cut: int(cut.parts.max()))
    for cut in (cuts[0], cuts[-1]):
        runner = Runner(asked.requests, planner.serialize(tree, cut))
        runner.problem = bad
        assert_contained(asked.queries, bad, *runner.run())


@pytest.mark.parametrize("shape", ["llama", "mha", "gemma-7"])
def test_tokens_that_grow_in_one_graph(shape):
    """Steps with NaN and without: nothing of one is left to the next."""
    heads, dtype, soft_cap = SHAPES[shape]
    problem = gpu_problem(forest(2000), heads, dtype, soft_cap=soft_cap)
    generator = torch.Generator().manual_seed(0)
    for plan in cuts_of(problem.paths, heads, headroom=20, most=2):
        one = replace(problem, k=problem.k.clone(), v=problem.v.clone())
        executor = Runner(one, plan).executor
        q, k, v = (x.clone() for x in (one.q, one.k, one.v))
        out = torch.full_like(q, math.nan)
        seq_lens, cache_loc = one.seq_lens.clone(), one.last_slots()

        executor.append(seq_lens, cache_loc)
        executor.run(layer_of(one, q, k, v, out))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            executor.append(seq_lens, cache_loc)
            executor.run(layer_of(one, q, k, v, out))
        for i in range(12):
            cache_loc.copy_(one.grow(generator))
            seq_lens.copy_(one.seq_lens)
            bad = poisoned(one, Poison("kv"[i % 2], NAN, i % 9, lambda n: n - 1))
            for now in (bad, one):
                for to, of in ((q, now.q), (k, now.k), (v, now.v)):
                    to.copy_(of)
                out.fill_(math.nan)
                graph.replay()
                if now is bad:
                    assert_contained(one, bad, out)
                else:
                    assert out.isfinite().all()


@gluon.jit
def not_cleaned(k, v, to, S):
    pass


def one_case(fault: bool) -> None:
    if fault:
        cleaning.clean = not_cleaned
    heads, dtype, _ = SHAPES["llama"]
    check(gpu_problem(forest(2000), heads, dtype), POISONS["private V"])


@pytest.mark.parametrize("fault", [False, True])
def test_blocks_that_are_not_cleaned_are_found(fault):
    """In a process of its own, because a kernel is made of the functions that it is first run
    with."""
    code = f"from tests.gpu import test_containment as t; t.one_case({fault})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode != 0) == fault, done.stderr
    assert ("hit without seeing it" in done.stderr) == fault, done.stderr
