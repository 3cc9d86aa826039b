"""Strategy `calibrated`: as good as every choice there is, by brute force."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.profit import choose_packing
from sgl_prefix_attn.records import HeadConfig, Packing
from tests.support.examples import examples
from tests.support.forests import (
    PROFIT_LENGTHS,
    bytes_only,
    kernel_costs,
    path_table,
    path_tables,
    random_paths,
)

HEADS = [HeadConfig(8, 8, 64), HeadConfig(32, 8, 128), HeadConfig(28, 4, 128), HeadConfig(7, 1, 80)]
BASELINES = ("query", "naive", "pat")


def own_cost(forest, packing, costs: CostModel) -> float:
    """Walk every request up its path, collect the packs, and add up what the docstrings of
    CostModel say a pack costs."""
    queries_of: dict[tuple, set] = {}
    partials = 0
    for row in range(forest.tail_parent.size):
        chain, node = [], int(forest.tail_parent[row])  # (id, start, end, merged), deepest first
        span = (int(forest.tail_start[row]), int(forest.seq_lens[row]))
        chain.append((~row, *span, bool(packing.tail[row])))
        while node >= 0:
            span = (int(forest.start[node]), int(forest.end[node]))
            chain.append((node, *span, bool(packing.node[node])))
            node = int(forest.parent[node])
        parts, last = [], None
        for name, start, end, merged in chain:
            last = last or (name, end)
            if not merged:
                parts.append((*last, start))
                last = None
        assert last is None
        for part in parts:
            queries_of.setdefault(part, set()).add(row)
        partials += len(parts) if len(parts) > 1 else 0
    total = partials * costs.partial
    for (_, end, start), rows in queries_of.items():
        tile_rows = -(-len(rows) * costs.group_size // costs.row_step) * costs.row_step
        kv_len = end - start
        total += max(kv_len * costs.kv_token, kv_len * tile_rows * costs.mma_row) + costs.item
    return total


def all_packings(forest):
    node_edges = np.flatnonzero(forest.parent >= 0)
    tail_edges = np.flatnonzero(forest.tail_parent >= 0)
    for bits in itertools.product((False, True), repeat=node_edges.size + tail_edges.size):
        node = np.zeros(forest.parent.size, bool)
        tail = np.zeros(forest.tail_parent.size, bool)
        node[node_edges], tail[tail_edges] = bits[: node_edges.size], bits[node_edges.size :]
        yield Packing(node, tail)


def edges(forest) -> int:
    return int((forest.parent >= 0).sum() + (forest.tail_parent >= 0).sum())


def at_most(a: float, b: float) -> bool:
    return a <= b * (1 + 1e-9)


def best_cost(forest, costs) -> float:
    return min(own_cost(forest, packing, costs) for packing in all_packings(forest))


def cost_of(forest, strategy, costs) -> float:
    return own_cost(forest, choose_packing(forest, strategy, costs), costs)


def test_calibrated_equals_brute_force_under_byte_costs():
    forests = (build_forest(random_paths(s, 6, 6, PROFIT_LENGTHS)) for s in itertools.count())
    fitting = (f for f in forests if 5 <= edges(f) <= 8 and f.parent.size >= 2)
    answers = set()
    models = itertools.cycle(HEADS)
    for forest, heads in itertools.islice(zip(fitting, models, strict=False), 120):
        costs = bytes_only(heads)
        chosen = choose_packing(forest, "calibrated", costs)
        assert own_cost(forest, chosen, costs) == pytest.approx(best_cost(forest, costs))
        answers.add((chosen.node.any() or chosen.tail.any(), chosen.tail.all()))
    assert len(answers) > 1, "the forests must not all have the same answer"


LARGE = [random_paths(batch, batch, 40, PROFIT_LENGTHS) for batch in (37, 113)]


@st.composite
def alike_forests(draw, max_edges=10):
    """Trees whose nodes have children with equally many requests each; lengths differ."""
    nodes, leaf, tails = [], [], []
    length = st.sampled_from(PROFIT_LENGTHS)

    def grow(parent, fan_outs):
        nodes.append((parent, draw(length)))
        here = len(nodes) - 1
        for _ in range(fan_outs[0]):
            if len(fan_outs) > 1:
                grow(here, fan_outs[1:])
            else:
                leaf.append(here)
                tails.append(draw(length))

    for _ in range(draw(st.integers(1, 2))):
        grow(-1, draw(st.lists(st.integers(2, 3), min_size=1, max_size=3)))
    forest = build_forest(path_table(nodes, leaf, tails))
    assume(edges(forest) <= max_edges)
    return forest


@given(
    alike_forests(),
    st.sampled_from(HEADS),
    st.sampled_from(["H100", "other"]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([0.01, 1.0, 30.0]),
)
@examples(60)
def test_calibrated_is_exact_with_tile_rounding_where_children_are_alike(
    forest, heads, gpu, row_step, mma
):
    costs = kernel_costs(heads, gpu)
    costs = replace(costs, row_step=row_step, mma_row=costs.mma_row * mma)
    cost = cost_of(forest, "calibrated", costs)
    assert cost == pytest.approx(best_cost(forest, costs))
    assert all(at_most(cost, cost_of(forest, baseline, costs)) for baseline in BASELINES)


@given(
    path_tables(max_nodes=20, max_batch=16, lengths=PROFIT_LENGTHS),
    st.sampled_from(HEADS),
    st.sampled_from(["bytes", "H100", "other"]),
    st.sampled_from([0.01, 1.0, 30.0]),
)
@example(LARGE[0], HEADS[0], "bytes", 1.0)
@example(LARGE[1], HEADS[1], "bytes", 1.0)
@example(LARGE[1], HEADS[2], "bytes", 1.0)
@example(LARGE[0], HEADS[3], "bytes", 1.0)
@examples(200)
def test_calibrated_is_never_worse_than_the_extremes_nor_pat_in_bytes(paths, heads, gpu, mma):
    """Merging all of a node's children and merging none are always among the cuts."""
    forest = build_forest(paths)
    costs = bytes_only(heads) if gpu == "bytes" else kernel_costs(heads, gpu)
    costs = replace(costs, mma_row=costs.mma_row * mma)
    cost = cost_of(forest, "calibrated", costs)
    others = BASELINES if gpu == "bytes" else ("query", "naive")
    assert all(at_most(cost, cost_of(forest, other, costs)) for other in others)


def test_calibrated_keeps_some_children_and_merges_others():
    """Root of 12 tokens: a with 3 requests merges, four long requests stay, although a costs less.

    In KV tokens, a partial result costs p = 2 * 32 * (128 * 2 + 8) / (2 * 8 * 128 * 2) = 4.125.
    a: merging saves 3 p = 12.4 and reads 12 more. The four others: merging all would save 8 p = 33
    (each would have a single part) and read 3 * 12 = 36 more. Below a, whose pack begins at 0,
    merging all three tails would save 6 p = 24.8 and read 2 * 32 = 64 more.
    """
    paths = path_table([(-1, 12), (0, 20)], [1, 1, 1, 0, 0, 0, 0], [1] * 3 + [5000] * 4)
    costs = bytes_only(HEADS[1])
    forest = build_forest(paths)
    packing = choose_packing(forest, "calibrated", costs)
    assert packing.node.tolist() == [False, True] and not packing.tail.any()
    assert own_cost(forest, packing, costs) == pytest.approx(best_cost(forest, costs))


PLAIN = CostModel(
    kv_token=1.0, mma_row=0.0, partial=1.0, item=0.0, group_size=4, row_step=1
)  # fmt: skip


def test_children_are_kept_by_what_each_saves_per_request():
    """Above 2 requests the root's pack is bound by tensor cores (0.1 * 4 rows per request and
    token). The node of 3 requests saves most in all, but least for each of them."""
    costs = replace(PLAIN, mma_row=0.1, partial=10.0)
    nodes, leaf = [(-1, 100), (0, 16)], [1, 1, 1, 0, 0, 0]
    forest = build_forest(path_table(nodes, leaf, [300, 5, 1, 300, 5, 1]))
    assert cost_of(forest, "calibrated", costs) == pytest.approx(best_cost(forest, costs))


def test_on_a_tie_kv_is_shared():
    """4 tokens of 2 requests: read once with 4 partial results, or twice without any."""
    forest = build_forest(path_table([(-1, 4)], [0, 0], [9, 9]))
    cost = [own_cost(forest, packing, PLAIN) for packing in all_packings(forest)]
    assert cost[0] == cost[-1] == min(cost)
    assert not choose_packing(forest, "calibrated", PLAIN).tail.any()


def test_group_size_makes_partials_dearer():
    """A node of 8 tokens with 4 queries. Without GQA (2 heads of 64, 2 bytes): reading it 4 times
    instead of once costs 3 * 8 * 512 = 12288 bytes, splitting costs 4 + 4 partials of
    2 * 2 * (64 * 2 + 8) = 544 bytes = 4352: split. With 16 query heads a KV head the partials cost
    16 times as much, 69632: merge."""
    forest = build_forest(path_table([(-1, 8)], [0] * 4, [50] * 4))
    for num_qo_heads, merged in ((2, False), (32, True)):
        costs = bytes_only(HeadConfig(num_qo_heads, 2, 64))
        assert choose_packing(forest, "calibrated", costs).tail.tolist() == [merged] * 4
