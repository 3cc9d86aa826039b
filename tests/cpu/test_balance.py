"""Forests that share less: still what the requests have in common, with fewer partial results."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefix_attn.plan.balance import balanced, share_within
from sgl_prefix_attn.plan.forest import build_forest
from tests.support.forests import deep_paths, nested_paths, path_table, path_tables, sharers

ANY = st.one_of(path_tables(max_nodes=20, max_batch=16), deep_paths())
PRICES = st.sampled_from([0.0, 1.0, 16.0, 200.0, 1e9])


def depths(forest) -> list[int]:
    """How many nodes stand above each request's tail."""
    node_depth: list[int] = []
    for parent in forest.parent.tolist():
        node_depth.append(1 + (node_depth[parent] if parent >= 0 else 0))
    return [node_depth[node] if node >= 0 else 0 for node in forest.tail_parent.tolist()]


def slot_copies(forest) -> int:
    """Index slots that the nodes and tails take."""
    nodes = (forest.end - forest.start).sum()
    return int(nodes + (forest.seq_lens - forest.tail_start).sum())


@given(ANY, PRICES)
@settings(max_examples=150, deadline=None)
def test_nodes_hold_what_their_requests_share_and_are_copied_seldom(paths, price):
    unique = build_forest(paths).unique_tokens
    forest = balanced(build_forest(paths), price)
    assert slot_copies(forest) <= unique * int(np.log2(paths.leaf.size + 1)), "halvings"
    assert all(-1 <= parent < i for i, parent in enumerate(forest.parent.tolist()))
    assert (forest.seq_lens == paths.seq_lens).all()
    requests = [set() for _ in forest.parent]
    for row in range(paths.leaf.size):
        node, begin = int(forest.tail_parent[row]), int(forest.tail_start[row])
        assert begin < forest.seq_lens[row]
        while node >= 0:
            requests[node].add(row)
            assert forest.end[node] == begin > forest.start[node], "a request's nodes are a path"
            node, begin = int(forest.parent[node]), int(forest.start[node])
        assert begin == 0
    for node, rows in enumerate(requests):
        assert len(rows) == forest.num_queries[node] >= 2
        assert rows <= sharers(paths, min(rows))[forest.end[node] - 1], "they share its last slot"


@given(ANY)
@settings(max_examples=150, deadline=None)
def test_with_every_cut_made_a_request_has_few_nodes(paths):
    forest = balanced(build_forest(paths), 1e9)
    assert max(depths(forest)) <= np.log2(paths.leaf.size)


@given(ANY)
@settings(max_examples=60, deadline=None)
def test_at_no_price_the_forest_stays(paths):
    forest = build_forest(paths)
    same = balanced(forest, 0)

    def nodes(one):
        return sorted(zip(one.start, one.end, one.num_queries, strict=True))

    assert nodes(same) == nodes(forest) and depths(same) == depths(forest)
    assert (same.tail_start == forest.tail_start).all()


@pytest.mark.parametrize("batch", [2, 48, 256, 1000])
def test_nested_prompts_come_down_to_the_bound(batch):
    forest = build_forest(nested_paths(batch, 200))
    least = batch * batch.bit_length()
    shared = share_within(forest, least)
    assert shared.num_queries.sum() + batch <= least
    assert share_within(forest, batch * batch) is forest, "what fits stays"


def test_a_batch_that_shares_nothing_stays():
    forest = build_forest(path_table([], [-1, -1], [5, 6]))
    assert share_within(forest, 0) is forest


def test_more_room_means_more_sharing():
    forest = build_forest(nested_paths(256, 200))
    copies = [slot_copies(share_within(forest, partials)) for partials in (2304, 6000, 20_000)]
    assert copies[0] > copies[1] > copies[2] > forest.unique_tokens


def test_a_long_document_above_nested_turns_is_shared_by_all():
    """Cutting the chain's first half off the document would read it once more."""
    turns = nested_paths(64, 10)
    nodes = [(-1, 100_000), *((parent, 10) for parent in range(64))]
    forest = build_forest(path_table(nodes, range(1, 65), [3] * 64))
    shared = share_within(forest, 1000)
    assert shared.num_queries.sum() + 64 <= 1000 < forest.num_queries.sum()
    assert shared.start.tolist().count(0) == 1
    assert slot_copies(shared) < 100_000 + 5 * build_forest(turns).unique_tokens
