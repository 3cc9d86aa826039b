"""The profit models: PAT's Algorithm 1 and FastTree's cost by hand, `calibrated` by brute force."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sgl_prefix_attn.plan import CostModel
from sgl_prefix_attn.plan.dynamic import predicted_cost
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.packs import make_packs
from sgl_prefix_attn.plan.profit import STRATEGIES, choose_merges
from sgl_prefix_attn.records import HeadConfig, Merges
from tests.cpu.forests import path_table, path_tables, random_paths

HEADS = [HeadConfig(8, 8, 64), HeadConfig(32, 8, 128), HeadConfig(28, 4, 128), HeadConfig(7, 1, 80)]
BASELINES = ("query", "naive", "pat")
# short and long nodes beside each other, around PAT's threshold of 4 tokens a query
PROFIT_LENGTHS = (1, 2, 3, 4, 5, 8, 12, 16, 17, 40, 200)


def own_cost(forest, merges, costs: CostModel) -> float:
    """Walk every request up its path, collect the packs, and add up what the docstrings of
    CostModel say a pack costs."""
    queries_of: dict[tuple, set] = {}
    partials = 0
    for row in range(forest.tail_parent.size):
        chain, node = [], int(forest.tail_parent[row])  # (id, start, end, merged), deepest first
        span = (int(forest.tail_start[row]), int(forest.seq_lens[row]))
        chain.append((~row, *span, bool(merges.tail[row])))
        while node >= 0:
            span = (int(forest.start[node]), int(forest.end[node]))
            chain.append((node, *span, bool(merges.node[node])))
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
        total += max(kv_len * costs.kv_token, kv_len * tile_rows * costs.mma_row) + costs.pack
    return total


def all_merges(forest):
    node_edges = np.flatnonzero(forest.parent >= 0)
    tail_edges = np.flatnonzero(forest.tail_parent >= 0)
    for bits in itertools.product((False, True), repeat=node_edges.size + tail_edges.size):
        node = np.zeros(forest.parent.size, bool)
        tail = np.zeros(forest.tail_parent.size, bool)
        node[node_edges], tail[tail_edges] = bits[: node_edges.size], bits[node_edges.size :]
        yield Merges(node, tail)


def edges(forest) -> int:
    return int((forest.parent >= 0).sum() + (forest.tail_parent >= 0).sum())


def at_most(a: float, b: float) -> bool:
    return a <= b * (1 + 1e-9)


# --- calibrated -----------------------------------------------------------------------------------
@given(
    path_tables(max_nodes=8, lengths=PROFIT_LENGTHS),
    st.sampled_from(HEADS),
    st.sampled_from(["bytes_only", "H100", "other"]),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_predicted_cost_is_the_documented_sum(paths, heads, model, data):
    forest = build_forest(paths)
    costs = CostModel.bytes_only(heads)
    if model != "bytes_only":
        costs = CostModel.for_gpu(model, heads)
    node = [p >= 0 and data.draw(st.booleans()) for p in forest.parent.tolist()]
    tail = [p >= 0 and data.draw(st.booleans()) for p in forest.tail_parent.tolist()]
    merges = Merges(np.array(node, bool), np.array(tail, bool))
    assert predicted_cost(forest, merges, costs) == pytest.approx(own_cost(forest, merges, costs))


def small_shared_forests():
    """60 forests of 5 to 10 edges, at least two shared nodes."""
    forests = (build_forest(random_paths(s, 6, 6, PROFIT_LENGTHS)) for s in itertools.count())
    fitting = (f for f in forests if 5 <= edges(f) <= 10 and f.parent.size >= 2)
    return list(itertools.islice(fitting, 60))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kv_bytes", [1, 4])
def test_calibrated_equals_brute_force_under_byte_costs(heads, kv_bytes):
    costs = CostModel.bytes_only(heads, kv_bytes)
    kinds = set()
    for forest in small_shared_forests():
        chosen = choose_merges(forest, "calibrated", costs)
        best = min(predicted_cost(forest, merges, costs) for merges in all_merges(forest))
        assert predicted_cost(forest, chosen, costs) == pytest.approx(best)
        kinds.add((chosen.node.any() or chosen.tail.any(), chosen.tail.all()))
    assert len(kinds) > 1, "the forests must not all have the same answer"


@given(
    path_tables(max_nodes=5, max_batch=6, min_batch=2, lengths=PROFIT_LENGTHS),
    st.sampled_from(HEADS),
    st.sampled_from([1, 2, 4]),
)
@settings(max_examples=60, deadline=None)
def test_calibrated_equals_brute_force_with_its_own_cost(paths, heads, kv_bytes):
    forest = build_forest(paths)
    assume(edges(forest) <= 8)
    costs = CostModel.bytes_only(heads, kv_bytes)
    chosen = choose_merges(forest, "calibrated", costs)
    best = min(own_cost(forest, merges, costs) for merges in all_merges(forest))
    assert own_cost(forest, chosen, costs) == pytest.approx(best)
    assert predicted_cost(forest, chosen, costs) == pytest.approx(best)


@given(path_tables(max_nodes=20, max_batch=16, lengths=PROFIT_LENGTHS), st.sampled_from(HEADS))
@settings(max_examples=100, deadline=None)
def test_calibrated_never_reads_more_bytes_than_the_baselines(paths, heads):
    forest = build_forest(paths)
    costs = CostModel.bytes_only(heads)
    cost = own_cost(forest, choose_merges(forest, "calibrated", costs), costs)
    for baseline in BASELINES:
        assert at_most(cost, own_cost(forest, choose_merges(forest, baseline, costs), costs))


@pytest.mark.parametrize("batch", [37, 113])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_calibrated_never_reads_more_bytes_in_large_batches(batch, heads):
    forest = build_forest(random_paths(batch, batch, 40, PROFIT_LENGTHS))
    costs = CostModel.bytes_only(heads)
    cost = own_cost(forest, choose_merges(forest, "calibrated", costs), costs)
    for baseline in BASELINES:
        assert at_most(cost, own_cost(forest, choose_merges(forest, baseline, costs), costs))


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
@settings(max_examples=60, deadline=None)
def test_calibrated_is_exact_with_tile_rounding_where_children_are_alike(
    forest, heads, gpu, row_step, mma
):
    costs = CostModel.for_gpu(gpu, heads)
    costs = replace(costs, row_step=row_step, mma_row=costs.mma_row * mma)
    chosen = choose_merges(forest, "calibrated", costs)
    best = min(own_cost(forest, merges, costs) for merges in all_merges(forest))
    assert own_cost(forest, chosen, costs) == pytest.approx(best)
    for baseline in BASELINES:
        other = own_cost(forest, choose_merges(forest, baseline, costs), costs)
        assert at_most(own_cost(forest, chosen, costs), other)


@given(
    path_tables(max_nodes=20, max_batch=16, lengths=PROFIT_LENGTHS),
    st.sampled_from(HEADS),
    st.sampled_from(["H100", "other"]),
    st.sampled_from([0.01, 1.0, 30.0]),
)
@settings(max_examples=100, deadline=None)
def test_calibrated_is_never_worse_than_the_extremes_under_any_costs(paths, heads, gpu, mma):
    """Merging all of a node's children and merging none are always among the cuts."""
    forest = build_forest(paths)
    costs = CostModel.for_gpu(gpu, heads)
    costs = replace(costs, mma_row=costs.mma_row * mma)
    cost = own_cost(forest, choose_merges(forest, "calibrated", costs), costs)
    for baseline in ("query", "naive"):
        assert at_most(cost, own_cost(forest, choose_merges(forest, baseline, costs), costs))


def test_group_size_makes_partials_dearer():
    """A node of 8 tokens with 4 queries. Without GQA (2 heads of 64, 2 bytes): reading it 4 times
    instead of once costs 3 * 8 * 512 = 12288 bytes, splitting costs 4 + 4 partials of
    2 * 2 * (64 * 2 + 8) = 544 bytes = 4352: split. With 16 query heads a KV head the partials cost
    16 times as much, 69632: merge."""
    forest = build_forest(path_table([(-1, 8)], [0] * 4, [50] * 4))
    for num_qo_heads, merged in ((2, False), (32, True)):
        costs = CostModel.bytes_only(HeadConfig(num_qo_heads, 2, 64))
        assert choose_merges(forest, "calibrated", costs).tail.tolist() == [merged] * 4


# --- PAT ------------------------------------------------------------------------------------------
def packs_of(forest, strategy, costs=None):
    costs = costs or CostModel.bytes_only(HEADS[0])
    packs = make_packs(forest, choose_merges(forest, strategy, costs))
    return {
        (int(packs.kv_start[i]), int(packs.kv_end[i])): sorted(
            packs.queries[packs.query_offset[i] : packs.query_offset[i + 1]].tolist()
        )
        for i in range(packs.kv_start.size)
    }


def test_pat_algorithm_1_by_hand():
    """PAT §5.1, Algorithm 1 (TreeHeuristic), in the situation of figure 6: scheme 1 (split) for one
    child of a node, scheme 2 (merge) for the other.

        root 10 tokens, queries 0-4
        |-- a  3 tokens, queries 0-2       |-- tail of 3, 21 tokens
        |   |-- tails of 0, 1, 2           |-- tail of 4, 22 tokens
        |       (20, 30, 40 tokens)

    root: child a has 3 queries: 4 * 3 = 12 < 10 is false -> scheme 2: a's blocks become root + a =
    [0, 13), and root loses queries 0-2. Tails of 3 and 4: 4 * 1 = 4 < 10 -> scheme 1, both split.
    a (len_s is a's own 3, not the merged 13): each tail has 4 * 1 = 4 < 3 false -> scheme 2: the
    tails of 0, 1, 2 take [0, 13) along and a has no queries left, so no pack.
    """
    paths = path_table([(-1, 10), (0, 3)], [1, 1, 1, 0, 0], [20, 30, 40, 21, 22])
    assert packs_of(build_forest(paths), "pat") == {
        (0, 10): [3, 4],
        (0, 33): [0],
        (0, 43): [1],
        (0, 53): [2],
        (10, 31): [3],
        (10, 32): [4],
    }


def test_pat_on_deeper_trees_by_hand():
    """root 9 tokens, queries 0-5, two children: a 5 tokens, queries 0-3; b 40 tokens, queries 4, 5.

    root: a has 4 * 4 = 16 < 9 false -> merge, root keeps 4, 5; b has 4 * 2 = 8 < 9 -> split.
    a: tails 4 < 5 -> split, so a's pack is [0, 14) for 0-3. b: tails 4 < 40 -> split.
    """
    paths = path_table([(-1, 9), (0, 5), (0, 40)], [1, 1, 1, 1, 2, 2], [11, 12, 13, 15, 16, 17])
    assert packs_of(build_forest(paths), "pat") == {
        (0, 9): [4, 5],
        (0, 14): [0, 1, 2, 3],
        (9, 49): [4, 5],
        (14, 25): [0],
        (14, 26): [1],
        (14, 27): [2],
        (14, 29): [3],
        (49, 65): [4],
        (49, 66): [5],
    }


@pytest.mark.parametrize("length, merged", [(7, True), (8, True), (9, False)])
def test_pat_threshold(length, merged):
    """4 * size < len splits, and equality merges (the algorithm, not the strict > of the text)."""
    forest = build_forest(path_table([(-1, length), (0, 50), (0, 50)], [1, 1, 2, 2], [9] * 4))
    assert choose_merges(forest, "pat", None).node.tolist() == [False, merged, merged]


# --- FastTree -------------------------------------------------------------------------------------
def test_compute_by_hand():
    """FastTree's published cost, group 1: C_mm(q, k) = 0.66 * padQ * k + 0.33 * padK * q with tile
    (64, 32) above 16 queries, else (16, 128); padQ = -q mod tile_q, padK = max(0, tile_k - k).

    root 40 tokens with 3 queries: a (100 tokens, queries 0, 1) and request 2's tail (200 tokens).
    C_mm(3, 40) = 0.66 * 13 * 40 + 0.33 * 88 * 3 = 343.2 + 87.12 = 430.32
    a:  split = C(3, 40) + C(2, 100) + 0.1 * 2 = 430.32 + (0.66 * 14 * 100 + 0.33 * 28 * 2)
              = 430.32 + 942.48 + 0.2 = 1373.00
        merge = C(1, 40) + C(2, 140) = (0.66 * 15 * 40 + 0.33 * 88) + 0.66 * 14 * 140
              = 425.04 + 1293.60 = 1718.64  ->  split
    tail of 0 (60 tokens) below a: split = C(2, 100) + C(1, 60) + 0.1
              = 942.48 + (0.66 * 15 * 60 + 0.33 * 68) + 0.1 = 942.48 + 616.44 + 0.1 = 1559.02
        merge = C(1, 100) + C(1, 160) = (990 + 9.24) + 1584 = 2583.24  ->  split; tail of 1 alike
    tail of 2: split = 430.32 + C(1, 200) + 0.1 = 430.32 + 1980 + 0.1 = 2410.42
        merge = C(2, 40) + C(1, 240) = (0.66 * 14 * 40 + 0.33 * 88 * 2) + 2376 = 427.68 + 2376
              -> split
    """
    paths = path_table([(-1, 40), (0, 100)], [1, 1, 0], [60, 60, 200])
    merges = choose_merges(build_forest(paths), "compute", CostModel.bytes_only(HEADS[0]))
    assert not merges.node.any() and not merges.tail.any()


def test_compute_merges_by_hand():
    """17 queries pad a 64-row tile, so one of them leaves (group 1, root 100 tokens, tails of 50).

    C(17, 100) = 0.66 * 47 * 100 + 0 = 3102; C(16, 100) = 0 + 0.33 * 28 * 16 = 147.84
    C(1, 50) = 0.66 * 15 * 50 + 0.33 * 78 = 495 + 25.74 = 520.74; C(1, 150) = 1485
    tail 0: split = 3102 + 520.74 + 0.1 = 3622.84 > merge = 147.84 + 1485 = 1632.84 -> merge
    tail 1, 16 queries left: split = 147.84 + 520.74 + 0.1 = 668.68;
        merge = C(15, 100) + 1485 = 66 + 138.6 + 1485 -> split, and so on: C(q, 100) only grows
    """
    paths = path_table([(-1, 100)], [0] * 17, [50] * 17)
    merges = choose_merges(build_forest(paths), "compute", CostModel.bytes_only(HEADS[0]))
    assert merges.tail.tolist() == [True] + [False] * 16


def fasttree(forest, group):
    """FastTree's greedy pass, children below a node in the order nodes, then tails."""

    def c_mm(queries, kv_len):
        tile_q, tile_k = (64, 32) if queries > 16 else (16, 128)
        pad_q, pad_k = -queries % tile_q, max(0, tile_k - kv_len)
        return 0.66 * pad_q * group * kv_len + 0.33 * pad_k * queries * group

    num_nodes = forest.parent.size
    length = (forest.end - forest.start).tolist()
    length += (forest.seq_lens - forest.tail_start).tolist()
    queries = forest.num_queries.tolist() + [1] * forest.tail_parent.size
    left = list(queries)
    merged = []
    for child, above in enumerate(forest.parent.tolist() + forest.tail_parent.tolist()):
        merged.append(False)
        if above < 0:
            continue
        q, k, k_above = queries[child], length[child], length[above]
        split = c_mm(left[above], k_above) + c_mm(q, k) + 0.1 * q
        merge = c_mm(left[above] - q, k_above) + c_mm(q, k + k_above)
        if split > merge:
            merged[child] = True
            left[above] -= q
            length[child] += k_above
    return merged[:num_nodes], merged[num_nodes:]


@given(path_tables(max_nodes=12, max_batch=20), st.sampled_from([1, 4, 7]))
@settings(max_examples=60, deadline=None)
def test_compute_is_fasttrees_greedy_pass(paths, group):
    forest = build_forest(paths)
    costs = CostModel.bytes_only(HeadConfig(group, 1, 64))
    merges = choose_merges(forest, "compute", costs)
    assert (merges.node.tolist(), merges.tail.tolist()) == fasttree(forest, group)


# --- all ------------------------------------------------------------------------------------------
@given(path_tables(max_nodes=12))
@example(path_table([], [-1], [1]))
@settings(max_examples=40, deadline=None)
def test_roots_have_nothing_to_merge_with(paths):
    forest = build_forest(paths)
    for strategy in STRATEGIES:
        merges = choose_merges(forest, strategy, CostModel.for_gpu("H100", HEADS[1]))
        assert merges.node.dtype == merges.tail.dtype == bool
        assert not merges.node[forest.parent < 0].any()
        assert not merges.tail[forest.tail_parent < 0].any()


def test_unknown_strategy():
    forest = build_forest(path_table([], [-1], [1]))
    with pytest.raises(ValueError, match="strategy must be one of query, naive.*got 'best'"):
        choose_merges(forest, "best", CostModel.bytes_only(HEADS[0]))
