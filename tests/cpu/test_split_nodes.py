"""Nodes that are split off: results of a query that are in several tiles are merged by query."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn import PrefixAttentionWrapper
from sgl_prefix_attn.execute import interpreter as oracle
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan import cut_time, search, serialize, split_nodes, tiles
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import PortableRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import STRATEGIES, HeadConfig
from tests.cpu.test_tiles import HEADS, check_output, loaded
from tests.support.examples import chosen, examples
from tests.support.forests import PROFIT_LENGTHS, chain, path_table, path_tables, random_paths
from tests.support.multi_token import multi_token
from tests.support.poison import POISONS, assert_contained, forest, poisoned
from tests.support.problems import assert_attention, make_problem

SPLITTING = tuple(name for name in STRATEGIES if name != "calibrated")


def planner(heads, strategy="calibrated", headroom=20, tile_rows=64, **changed):
    return Planner(
        heads, num_sms=16, rates=PortableRates(), headroom=headroom, tile_rows=tile_rows,
        strategy=strategy, splits_nodes=True, **changed,
    )  # fmt: skip


def check_cuts(paths, heads, strategy, *, growth=0, soft_cap=0.0, tile_rows=64, most=3) -> None:
    made = planner(heads, strategy, max(growth, 1), tile_rows)
    tree = build_forest(paths)
    cuts = sorted(made.cuts(tree), key=lambda cut: (cut.split_off > 0, cut.us))
    for cut in chosen(cuts, most):
        problem = make_problem(paths, heads, torch.float64, soft_cap=soft_cap, room=growth)
        words, blocks = loaded(made.serialize(tree, cut), problem)
        check_output(words, problem, blocks)
        generator = torch.Generator().manual_seed(0)
        for _ in range(growth):
            oracle.append(words, problem.seq_lens + 1, problem.grow(generator), blocks)
        if growth:
            check_output(words, problem, blocks)


@given(
    path_tables(lengths=PROFIT_LENGTHS), st.sampled_from(HEADS), st.sampled_from(STRATEGIES),
    st.integers(0, 9), st.sampled_from([0.0, 3.0]), st.sampled_from([16, 64, 128]),
)  # fmt: skip
@examples(25)
def test_every_strategy_computes_full_attention(paths, heads, strategy, growth, cap, tile_rows):
    check_cuts(paths, heads, strategy, growth=growth, soft_cap=cap, tile_rows=tile_rows)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("batch", [1, 37, 113])
def test_odd_batches(batch, strategy):
    check_cuts(random_paths(batch, batch, 25), HEADS[1], strategy, growth=2, most=2)


def test_a_node_is_split_into_parts():
    paths = path_table([(-1, 4097)], [0, 0, 0, -1, -1, -1], [1, 63, 4097, 1, 63, 4097])
    made, tree = planner(HEADS[1], "naive"), build_forest(paths)
    cuts = [cut for cut in made.cuts(tree) if cut.parts[: cut.split_off].max() >= 3]
    problem = make_problem(paths, HEADS[1], torch.float64)
    for cut in cuts[:2]:
        words, blocks = loaded(made.serialize(tree, cut), problem)
        check_output(words, problem, blocks)
    assert cuts


@pytest.mark.parametrize("strategy", ["naive", "pat", "compute"])
@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_several_tokens_a_request(heads, strategy):
    asked = multi_token(forest(), [4, 1, 9, 1, 1, 33, 2, 1, 5], heads, torch.float64)
    tree = build_forest(asked.requests.paths, asked.query_lens)
    made = planner(heads, strategy)
    cuts = list(made.cuts(tree))
    assert any(cut.split_off for cut in cuts)
    for cut in chosen(cuts, 3):
        words, blocks = loaded(made.serialize(tree, cut), asked.requests)
        check_output(words, asked.queries, blocks)


def split_plan(heads=HEADS[0], dtype=torch.float64):
    """A plan that splits nodes off, its problem, words and blocks."""
    paths = random_paths(5, 37, 12)
    problem = make_problem(paths, heads, dtype)
    plan = planner(heads, "naive").plan(paths)
    assert plan.words[W.H_MERGES] and plan.num_places > 0
    return plan, problem, *loaded(plan, problem)


def merged_row(words) -> tuple[int, int]:
    """Word offsets of the MERGE words of a query in several items, and of its places."""
    merges = int(words[W.H_MERGES])
    for row in range(int(words[W.H_BATCH])):
        at = merges + row * W.MERGE_WORDS
        if words[at + W.M_COUNT] > 1:
            return at, int(words[at + W.M_PLACES])
    raise AssertionError("no query is merged")


def drop_a_partial(words):
    words[merged_row(words)[0] + W.M_COUNT] -= 1


def name_one_twice(words):
    _, places = merged_row(words)
    words[places] = words[places + 1]


def swap_two(words):
    at, places = merged_row(words)
    other = places + int(words[at + W.M_COUNT])  # the first place of another query
    words[[places, other]] = words[[other, places]]


@pytest.mark.parametrize("fault", [drop_a_partial, name_one_twice, swap_two])
def test_a_wrong_table_is_found(fault):
    _, problem, words, blocks = split_plan()
    check_output(words, problem, blocks)
    fault(words)
    with pytest.raises(AssertionError, match="all merged once|another query"):
        check_output(words, problem, blocks)


@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
@pytest.mark.parametrize("name", POISONS)
def test_what_is_not_finite_stays_with_those_that_see_it(name, heads):
    paths = forest()
    problem = make_problem(paths, heads, torch.float32)
    bad = poisoned(problem, POISONS[name])
    made, tree = planner(heads, "naive"), build_forest(paths)
    cuts = list(made.cuts(tree))
    for cut in (cuts[0], cuts[-1]):
        words, blocks = loaded(made.serialize(tree, cut), problem)
        out, lse = oracle.execute(words, bad.q, bad.k, bad.v, blocks, sm_scale=bad.sm_scale)
        assert_contained(problem, bad, out.float(), lse.float())


# Wide tiles are ten times as slow as narrow ones: a long node of all requests is best read in wide
# tiles, so as not to be read often, and the tails in narrow ones.
PLANTED = PortableRates(
    wide=5.0, wide_masked=5.0, narrow=0.5, narrow_masked=0.5, item=0.1, hbm=3e6, l2=5.5e6,
    fixed=5.0, split=1.5, part=0.07, partial=1e9, overlap=3.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("rates", "split"), [(PLANTED, True), (replace(PLANTED, split=1e4), False)]
)
def test_a_node_is_split_where_that_is_predicted_to_win(rates, split):
    heads = HeadConfig(32, 8, 128)
    paths = path_table([(-1, 8192)], [0] * 64, [640] * 64)
    made = Planner(heads, num_sms=264, rates=rates, headroom=0, tile_rows=64, splits_nodes=True)
    cuts = made.cuts(build_forest(paths))
    best = min(cuts, key=lambda cut: cut.us)
    assert bool(best.split_off) == split
    plan = made.plan(paths)
    assert bool(plan.words[W.H_MERGES]) == split
    merged = Planner(heads, num_sms=264, rates=rates, headroom=0, tile_rows=64).plan(paths)
    assert not merged.words[W.H_MERGES]
    assert plan.predicted_us < 0.95 * merged.predicted_us or not split


def test_the_packings_are_those_of_the_profit_model():
    """Each pack is items of its own: nothing but tails is in several requests' tiles."""
    paths = path_table([(-1, 40), (0, 200)], [0] * 3 + [1] * 20, [5] * 23)
    tree = build_forest(paths)
    items = {name: planner(HEADS[0], name).plan(paths).stats for name in SPLITTING}
    assert items["query"].kv_tokens_read == items["query"].kv_tokens_query_centric
    assert items["query"].num_items == 23 and items["query"].num_partials == 0
    # 20 queries of 4 heads are two tiles of 64 rows: each reads the node
    tails = 23 * 5
    assert items["naive"].kv_tokens_read == 2 * (40 + 200) + tails
    # 4 * 20 >= 40: the root is merged into its child, which reads it for its own requests
    assert items["pat"].kv_tokens_read == 2 * 240 + 40 + tails
    assert tree.parent.size == 2


def test_a_kernel_that_does_not_merge_by_query_refuses():
    with pytest.raises(ValueError, match="strategy pat.*calibrated alone"):
        Planner(HEADS[0], num_sms=16, strategy="pat")
    with pytest.raises(ValueError, match="strategy must be one of"):
        planner(HEADS[0], "best")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cpu_runs_every_strategy(strategy):
    heads = HEADS[0]
    paths = random_paths(5, 37, 12)
    problem = make_problem(paths, heads, torch.float32)
    backend = TorchBackend(heads, torch.float32, torch.device("cpu"), tile_rows=64)
    plan = planner(heads, strategy).plan(paths)
    executor = PlanExecutor(backend, Capacity.for_plans(plan))
    executor.load(plan, problem.req_to_token, problem.pool)
    out = torch.full_like(problem.q, math.nan)
    executor.run(problem.layer(out))
    assert_attention(problem, out)


def test_plans_without_split_nodes_have_no_table():
    paths = random_paths(3, 24, 8)
    tree = build_forest(paths)
    made = Planner(HEADS[0], num_sms=16)
    for cut in made.cuts(tree):
        plan = made.serialize(tree, cut)
        assert plan.num_places == 0 and plan.words[W.H_MERGES] == 0 and cut.split_off == 0
        assert (plan.items[:, W.I_PARTS] != W.BY_QUERY).all()
        assert np.unique(cut.leaves.query).size == cut.leaves.query.size


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_wrapper_runs_every_strategy_as_row_tiles(strategy):
    paths = random_paths(5, 37, 12)
    problem = make_problem(paths, HeadConfig(8, 2, 16), torch.float32)
    wrapper = PrefixAttentionWrapper(
        8, 2, 16, page_size=1, device="cpu", dtype=torch.float32, strategy=strategy,
        kernels="portable", sm_scale=problem.sm_scale,
    )  # fmt: skip
    nodes = [
        [(node, int(paths.length[node])) for node in chain(paths, row)]
        for row in range(paths.leaf.size)
    ]
    wrapper.plan(nodes, problem.seq_lens, problem.req_to_token, problem.pool)
    assert_attention(problem, wrapper.run(problem.q, (problem.k, problem.v)))
    words = wrapper._executor.plan.words
    assert words[W.H_TILE_ROWS] == 64
    assert bool(words[W.H_MERGES]) == (strategy in ("naive", "compute", "pat"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_server_has_room_for_plans_of_every_strategy(strategy):
    heads = HeadConfig(32, 8, 16)
    backend = TorchBackend(heads, torch.float32, torch.device("cpu"), tile_rows=64)
    capacity = backend.server_capacity(max_batch=64, max_tokens=40_000, headroom=20)
    made = planner(heads, strategy, capacity=capacity)
    for seed in range(5):
        paths = random_paths(seed, 64, 25)
        assert capacity.covers(made.plan(paths))


def test_a_step_whose_partial_results_have_no_room_merges_its_nodes():
    heads = HeadConfig(32, 8, 128)
    paths = path_table([(-1, 8192)], [0] * 64, [640] * 64)
    tree = build_forest(paths)
    made = Planner(
        heads, num_sms=264, rates=PLANTED, headroom=0, tile_rows=64, splits_nodes=True,
        capacity=Capacity(words=1 << 20, index_slots=1 << 24, partials=100),
    )  # fmt: skip
    assert min(made.cuts(tree), key=lambda cut: cut.us).split_off
    plan = made.plan(paths)
    assert made.capacity.covers(plan) and not plan.words[W.H_MERGES]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_warming_up_compiles_every_loop(strategy):
    made = planner(HEADS[0], strategy)
    made.warm_up()
    # those that Python calls: what they call is compiled with them, or comes from disk with them
    loops = (
        split_nodes._places_of, split_nodes._ranges, split_nodes._stretch_tiles, search._search,
        search.edges_of, tiles.lay_out, serialize._serialize, cut_time.time_ways,
    )  # fmt: skip
    compiled = {loop: len(loop.signatures) for loop in loops}
    assert all(compiled.values())
    tree = build_forest(random_paths(6, 30, 8, (64, 300)))
    for cut in made.cuts(tree):
        made.serialize(tree, cut)
    assert all(len(loop.signatures) == count for loop, count in compiled.items())
