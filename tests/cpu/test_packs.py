"""Forest + packing -> packs: runs of merged nodes, each position of each request covered once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.packs import make_packs
from sgl_prefix_attn.plan.profit import choose_packing
from sgl_prefix_attn.records import HeadConfig, Packing
from tests.support.examples import examples
from tests.support.forests import bytes_only, path_tables

COSTS = bytes_only(HeadConfig(8, 2, 64))


@st.composite
def merged_forests(draw):
    """Any forest with any packing: most of them no strategy would choose."""
    forest = build_forest(draw(path_tables(max_nodes=12)))
    node = [parent >= 0 and draw(st.booleans()) for parent in forest.parent.tolist()]
    tail = [parent >= 0 and draw(st.booleans()) for parent in forest.tail_parent.tolist()]
    return forest, Packing(np.array(node, bool), np.array(tail, bool))


def expected_packs(forest, packing):
    """{(last node or ~row, KV start): [KV end, requests]} by walking up from every request."""
    packs = {}
    for row in range(forest.tail_parent.size):
        last, end = ~row, int(forest.seq_lens[row])
        start, merged = int(forest.tail_start[row]), packing.tail[row]
        node = int(forest.tail_parent[row])
        while True:
            if not merged:  # the run of merged nodes ends here, below `node`
                packs.setdefault((last, start), [end, set()])[1].add(row)
            if node < 0:
                break
            if not merged:
                last, end = node, int(forest.end[node])
            start, merged = int(forest.start[node]), packing.node[node]
            node = int(forest.parent[node])
    return packs


def as_dict(packs, forest):
    found = {}
    for i in range(packs.kv_start.size):
        rows = packs.queries[packs.query_offset[i] : packs.query_offset[i + 1]].tolist()
        assert len(set(rows)) == len(rows), "a request stands in a pack twice"
        start, end, tail = (int(x[i]) for x in (packs.kv_start, packs.kv_end, packs.tail))
        if tail >= 0:
            last = ~tail
        else:  # the node of these requests that ends where the pack ends
            last = int(forest.tail_parent[rows[0]])
            while forest.end[last] != end:
                last = int(forest.parent[last])
        assert (last, start) not in found
        found[last, start] = [end, set(rows)]
    return found


@given(merged_forests())
@examples(200)
def test_packs_are_the_runs_of_merged_nodes(case):
    forest, packing = case
    packs = make_packs(forest, packing)
    assert as_dict(packs, forest) == expected_packs(forest, packing)
    covered = [[] for _ in range(forest.tail_parent.size)]
    for i in range(packs.kv_start.size):
        for row in packs.queries[packs.query_offset[i] : packs.query_offset[i + 1]]:
            covered[row] += range(packs.kv_start[i], packs.kv_end[i])
    for row, positions in enumerate(covered):
        assert sorted(positions) == list(range(forest.seq_lens[row]))


@given(path_tables(max_nodes=12))
@examples(60)
def test_naive_is_one_pack_a_node_and_query_one_a_request(paths):
    forest = build_forest(paths)
    batch, num_nodes = forest.tail_parent.size, forest.parent.size
    naive = make_packs(forest, choose_packing(forest, "naive", COSTS))
    assert naive.kv_start.size == num_nodes + batch
    assert naive.kv_start.tolist() == forest.start.tolist() + forest.tail_start.tolist()
    assert naive.kv_end.tolist() == forest.end.tolist() + forest.seq_lens.tolist()
    assert np.diff(naive.query_offset).tolist() == forest.num_queries.tolist() + [1] * batch
    query = make_packs(forest, choose_packing(forest, "query", COSTS))
    assert query.kv_start.tolist() == [0] * batch
    assert query.kv_end.tolist() == forest.seq_lens.tolist()
    assert query.queries.tolist() == query.tail.tolist() == list(range(batch))
