"""The profit models that are not calibrated: PAT's Algorithm 1 and FastTree's cost, by hand."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.packs import make_packs
from sgl_prefix_attn.plan.profit import choose_packing
from sgl_prefix_attn.records import STRATEGIES, HeadConfig
from tests.support.examples import examples
from tests.support.forests import bytes_only, kernel_costs, path_table, path_tables

HEADS = HeadConfig(8, 8, 64)


def packs_of(forest, strategy, costs=None):
    costs = costs or bytes_only(HEADS)
    packs = make_packs(forest, choose_packing(forest, strategy, costs))
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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_pat_threshold(size, beyond):
    """4 * size < len splits, and equality merges (the algorithm, not the strict > of the text)."""
    root, merged = (-1, 4 * size + beyond), [beyond <= 0] * 2
    if size == 1:
        forest = build_forest(path_table([root], [0, 0], [9, 9]))
        assert choose_packing(forest, "pat", None).tail.tolist() == merged
    else:
        forest = build_forest(path_table([root, (0, 50), (0, 50)], [1, 1, 2, 2], [9] * 4))
        assert choose_packing(forest, "pat", None).node.tolist() == [False, *merged]


# --- FastTree -------------------------------------------------------------------------------------
def test_compute_merges_by_hand():
    """FastTree's published cost, group 1: C_mm(q, k) = 0.66 * padQ * k + 0.33 * padK * q with tile
    (64, 32) above 16 queries, else (16, 128); padQ = -q mod tile_q, padK = max(0, tile_k - k).

    17 queries pad a 64-row tile, so one of them leaves (root 100 tokens, tails of 50).

    C(17, 100) = 0.66 * 47 * 100 + 0 = 3102; C(16, 100) = 0 + 0.33 * 28 * 16 = 147.84
    C(1, 50) = 0.66 * 15 * 50 + 0.33 * 78 = 495 + 25.74 = 520.74; C(1, 150) = 1485
    tail 0: split = 3102 + 520.74 + 0.1 = 3622.84 > merge = 147.84 + 1485 = 1632.84 -> merge
    tail 1, 16 queries left: split = 147.84 + 520.74 + 0.1 = 668.68;
        merge = C(15, 100) + 1485 = 66 + 138.6 + 1485 -> split, and so on: C(q, 100) only grows
    """
    paths = path_table([(-1, 100)], [0] * 17, [50] * 17)
    packing = choose_packing(build_forest(paths), "compute", bytes_only(HEADS))
    assert packing.tail.tolist() == [True] + [False] * 16


def test_compute_counts_a_reduction_for_every_query():
    """Where the reduction of 7 queries tips the balance, and that of one would not.

    root 23 tokens with 12 queries, a 143 tokens with 7 of them:
    C(12, 23) = 0.66 * 4 * 23 + 0.33 * 105 * 12 = 60.72 + 415.80 = 476.52
    C(7, 143) = 0.66 * 9 * 143 = 849.42, so split = 476.52 + 849.42 + 0.1 * 7 = 1326.64
    merge = C(5, 23) + C(7, 166) = (0.66 * 11 * 23 + 0.33 * 105 * 5) + 0.66 * 9 * 166
          = 340.23 + 986.04 = 1326.27  ->  merge; with 0.1 alone split would be 1326.04
    """
    paths = path_table([(-1, 23), (0, 143)], [1] * 7 + [0] * 5, [500] * 12)
    packing = choose_packing(build_forest(paths), "compute", bytes_only(HEADS))
    assert packing.node.tolist() == [False, True]


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
@examples(60)
def test_compute_is_fasttrees_greedy_pass(paths, group):
    forest = build_forest(paths)
    costs = bytes_only(HeadConfig(group, 1, 64))
    packing = choose_packing(forest, "compute", costs)
    assert (packing.node.tolist(), packing.tail.tolist()) == fasttree(forest, group)


# --- all ------------------------------------------------------------------------------------------
@given(path_tables(max_nodes=12))
@example(path_table([], [-1], [1]))
@examples(40)
def test_roots_have_nothing_to_merge_with(paths):
    forest = build_forest(paths)
    for strategy in STRATEGIES:
        packing = choose_packing(forest, strategy, kernel_costs(HEADS, "H100"))
        assert packing.node.dtype == packing.tail.dtype == bool
        assert not packing.node[forest.parent < 0].any()
        assert not packing.tail[forest.tail_parent < 0].any()
