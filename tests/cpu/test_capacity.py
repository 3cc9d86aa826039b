"""Plans keep within the workspace of a server, however deep the tree is, and stay right."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefix_attn.plan import STRATEGIES, CostModel, Planner
from sgl_prefix_attn.plan.capacity import Capacity
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.tile_defaults import gpu_tile_set
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import (
    deep_paths,
    nested_paths,
    path_table,
    path_tables,
    splitting_costs,
    splitting_tiles,
)
from tests.support.plan_words import check_coverage
from tests.support.problems import assert_attention, make_problem
from tests.support.running import loaded, run

HEADS = HeadConfig(8, 2, 32)


def tight(paths, headroom, heads=HEADS) -> Capacity:
    """A server that these requests fill, without the rows that are meant for splits."""
    batch, tokens = paths.leaf.size, build_forest(paths).unique_tokens
    tiles = splitting_tiles(heads)
    server = Capacity.for_server(batch, tokens, headroom, tiles, heads)
    return replace(server, partials=batch * batch.bit_length())


def planner(strategy, capacity, headroom, heads=HEADS) -> Planner:
    return Planner(
        heads, tile_set=splitting_tiles(heads), strategy=strategy, costs=splitting_costs(heads),
        headroom=headroom, capacity=capacity,
    )  # fmt: skip


@given(
    st.one_of(path_tables(max_nodes=16, max_batch=16), deep_paths(max_batch=24)),
    st.sampled_from(STRATEGIES),
    st.sampled_from([0, 3]),
    st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_every_plan_fits_the_server_and_is_full_attention(paths, strategy, headroom, seed):
    capacity = tight(paths, headroom)
    plan = planner(strategy, capacity, headroom).plan(paths)
    assert capacity.covers(plan)
    check_coverage(plan, paths)
    assert plan.stats.kv_tokens_unique == build_forest(paths).unique_tokens
    problem = make_problem(paths, HEADS, torch.float32, seed=seed)
    assert_attention(problem, *run(loaded(problem, plan), problem))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("batch", "length"), [(48, 40), (256, 16), (256, 40)])
def test_nested_prompts_fit(batch, length, strategy):
    paths = nested_paths(batch, length)
    capacity = tight(paths, headroom=64)
    plan = planner(strategy, capacity, headroom=64).plan(paths)
    assert capacity.covers(plan)
    check_coverage(plan, paths)
    assert strategy == "query" or plan.stats.kv_tokens_read < plan.stats.kv_tokens_query_centric / 2


@given(st.one_of(path_tables(), deep_paths()), st.sampled_from(STRATEGIES))
@settings(max_examples=60, deadline=None)
def test_a_plan_that_fits_is_the_same_with_a_capacity(paths, strategy):
    plan = planner(strategy, Capacity(10**9, 10**9, 10**9), 20).plan(paths)
    exact, parts = Capacity.for_plans(plan), build_forest(paths).num_queries.sum() + paths.leaf.size
    exact = replace(exact, partials=max(exact.partials, int(parts)))
    assert planner(strategy, exact, 20).plan(paths).words.tolist() == plan.words.tolist()


@given(st.one_of(path_tables(), deep_paths()), st.sampled_from(STRATEGIES))
@settings(max_examples=60, deadline=None)
def test_words_are_bounded_by_the_partial_rows(paths, strategy):
    """A server's capacity has the words of its partial rows, so words alone never overflow."""

    def most_words(partials):
        return 24 + 14 * paths.leaf.size + 12 * (partials + paths.leaf.size)

    plan = planner(strategy, tight(paths, 0), 0).plan(paths)
    assert plan.words.size <= most_words(plan.num_partials)
    server = Capacity.for_server(paths.leaf.size, 1000, 0, splitting_tiles(HEADS), HEADS)
    assert server.words >= most_words(server.partials)


def test_long_kv_is_cut_less_where_partial_rows_are_few():
    heads, paths = HeadConfig(8, 1, 128), path_table([(-1, 100_000)], [0] * 16, [200] * 16)
    tiles, costs = gpu_tile_set(132, heads), CostModel.for_gpu("H100", heads)
    free = Planner(heads, tile_set=tiles, costs=costs).plan(paths)
    assert Capacity.for_server(16, 103_200, 64, tiles, heads).covers(free)
    for partials in (free.num_partials - 1, 1000, 100, 32):
        capacity = replace(Capacity.for_plans(free), partials=partials)
        plan = Planner(heads, tile_set=tiles, costs=costs, capacity=capacity).plan(paths)
        assert capacity.covers(plan)
        assert plan.num_partials > partials / 3, "no fewer cuts than needed"
    assert plan.num_partials == 32, "nothing is cut: a shared and an own part each"


def test_sizes_grow_to_powers_of_two():
    grown = Capacity(100, 1000, 8).grown_to(Capacity(65, 1025, 9))
    assert grown == Capacity(128, 2048, 16)
    assert Capacity(100, 1000, 8).grown_to(Capacity(1, 1, 1)) == Capacity(100, 1000, 8)


@pytest.mark.parametrize(
    ("batch", "shared", "tail", "strategy"),
    [
        (16, 0, 250, "calibrated"), (16, 0, 1, "calibrated"), (4096, 512, 1, "calibrated"),
        (2, 1000, 1, "query"),  # the shared slots are listed for both
        (1, 0, 100_000, "calibrated"),  # as many parts as there are CTAs
    ],
)  # fmt: skip
def test_what_fills_the_pool_fits_without_sharing_less(batch, shared, tail, strategy):
    heads, headroom = HeadConfig(8, 2, 64), 64
    nodes = [(-1, shared)] if shared else []
    tiles, costs = gpu_tile_set(132, heads), CostModel.for_gpu("H100", heads)
    make = Planner(heads, strategy=strategy, tile_set=tiles, costs=costs, headroom=headroom)
    plan = make.plan(path_table(nodes, [len(nodes) - 1] * batch, [tail] * batch))
    capacity = Capacity.for_server(batch, shared + batch * tail, headroom, tiles, heads)
    assert capacity.covers(plan)
