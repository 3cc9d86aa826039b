"""The kernel over latent KV on a Hopper GPU = full attention, over poisoned memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_prefix_attn.execute.backends.choice import new_backend, why_no_hopper
from sgl_prefix_attn.execute.backends.family import HOPPER
from sgl_prefix_attn.execute.self_test import check_kernels, self_test_paths
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import LatentRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.examples import chosen
from tests.support.forests import path_table, random_paths
from tests.support.multi_token import multi_token
from tests.support.poison import NAN, POISONS, Poison, assert_contained, forest, poisoned
from tests.support.problems import assert_attention, make_problem
from tests.support.running import append, executor, load, loaded, run

DEV = torch.device("cuda")
BF16 = torch.bfloat16


def mla(heads: int) -> HeadConfig:
    return HeadConfig(heads, 1, 576, 512)


@pytest.fixture(autouse=True)
def _hopper():
    if (why_not := why_no_hopper(DEV, mla(16), BF16)) is not None:
        pytest.skip(f"no kernel over latent KV here: {why_not}")


def planner_of(heads, **options):
    sms = torch.cuda.get_device_properties(DEV).multi_processor_count
    return Planner(heads, num_sms=sms, rates=LatentRates(), tile_rows=64, **options)


def plans_of(paths, heads, query_lens=None, most=4, **options):
    """The fastest, the slowest and some between."""
    planner, tree = planner_of(heads, **options), build_forest(paths, query_lens)
    cuts = sorted(planner.cuts(tree), key=lambda cut: cut.us)
    return [planner.serialize(tree, cut) for cut in chosen(cuts, most)]


TREES = {
    "one root": path_table([(-1, 8192)], [0] * 64, [256] * 64),
    # few tiles, of more parts than half of their rows
    "few requests": path_table([(-1, 8192)], [0] * 9, [256] * 9),
    "three levels": path_table(
        [(-1, 2048), *[(0, 2048)] * 4], [1 + i // 16 for i in range(64)], [256] * 64
    ),
    "nothing shared": path_table([], [-1] * 37, [63] * 18 + [4097] * 19),
    "random, 113": random_paths(113, 113, 25),
    "one request": path_table([], [-1], [1]),
}


@pytest.mark.parametrize("heads", [1, 8, 12, 16, 20, 24, 32])
@pytest.mark.parametrize("tree", TREES)
def test_plans_are_full_attention(tree, heads):
    problem = make_problem(TREES[tree], mla(heads), BF16, device=DEV)
    for plan in plans_of(problem.paths, problem.heads):
        made = loaded(problem, plan, family=HOPPER)
        for _ in range(2):  # counters are 0 again behind a launch
            assert_attention(problem, *run(made, problem))


@pytest.mark.parametrize("heads", [12, 16])
def test_growth(heads):
    problem = make_problem(forest(), mla(heads), BF16, device=DEV)
    (plan, *_) = plans_of(problem.paths, problem.heads, headroom=16)
    made = loaded(problem, plan, family=HOPPER)
    generator = torch.Generator().manual_seed(7)
    for _ in range(16):
        append(made, problem, problem.grow(generator).to(DEV))
    assert_attention(problem, *run(made, problem))
    bad = poisoned(problem, Poison("v", NAN, 4, lambda n: n - 7))
    assert_contained(problem, bad, *run(made, bad))


@pytest.mark.parametrize("heads", [12, 16, 32])
def test_several_query_tokens(heads):
    lens = np.array([4, 1, 9, 1, 1, 33, 2, 1, 5], np.int32)
    asked = multi_token(forest(), lens, mla(heads), BF16, device=DEV)
    for plan in plans_of(asked.requests.paths, mla(heads), lens):
        made = executor(asked.requests, plan, family=HOPPER)
        load(made, asked.requests, plan)
        assert_attention(asked.queries, *run(made, asked.queries))


@pytest.mark.parametrize("name", POISONS)
def test_what_is_no_number_stays_with_its_request(name):
    problem = make_problem(forest(), mla(16), BF16, device=DEV)
    bad = poisoned(problem, POISONS[name])
    for plan in plans_of(problem.paths, problem.heads):
        made = loaded(problem, plan, family=HOPPER)
        assert_contained(problem, bad, *run(made, bad))


def test_a_graph_serves_later_plans():
    problem = make_problem(forest(), mla(16), BF16, device=DEV)
    plans = plans_of(problem.paths, problem.heads)
    made = executor(problem, *plans, family=HOPPER)
    out = torch.full_like(problem.q[..., :512], torch.nan)
    load(made, problem, plans[0])
    made.run(problem.layer(out))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(problem.layer(out))
    for plan in plans:
        load(made, problem, plan)
        out.fill_(torch.nan)
        graph.replay()
        assert_attention(problem, out)


def test_the_self_test_passes():
    backend = new_backend(HOPPER, DEV, mla(16), BF16)
    planner = planner_of(mla(16), headroom=2)
    tree = build_forest(self_test_paths())
    plans = [planner.serialize(tree, cut) for cut in planner.cuts(tree)]
    check_kernels(backend, plans, 0.0)
