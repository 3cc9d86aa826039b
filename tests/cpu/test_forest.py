"""Paths -> forest: shared nodes only, maximal, and what is no valid path."""

import copy

import numpy as np
import pytest
from hypothesis import example, given

from sgl_prefix_attn.plan.forest import build_forest
from tests.support.examples import examples
from tests.support.forests import path_table, path_tables, random_paths, sharers


def check_forest(paths):
    """Along every request: a node for each maximal stretch with the same requests, two or more;
    then the tail."""
    forest = build_forest(paths)
    parents = forest.parent.tolist()
    assert all(-1 <= parent < i for i, parent in enumerate(parents)), "parents come first"
    requests: dict[int, set] = {}
    for row in range(paths.leaf.size):
        shared = [s for s in sharers(paths, row) if len(s) > 1]
        runs = []  # [start, end, requests] of each stretch
        for position, group in enumerate(shared):
            if not runs or runs[-1][2] != group:
                runs.append([position, position, group])
            runs[-1][1] = position + 1
        assert forest.tail_start[row] == len(shared)
        node = int(forest.tail_parent[row])
        for start, end, group in reversed(runs):
            assert (forest.start[node], forest.end[node]) == (start, end)
            assert forest.num_queries[node] == len(group)
            requests.setdefault(node, set()).add(row)
            assert requests[node] <= group
            node = parents[node]
        assert node == -1
    assert set(requests) == set(range(forest.parent.size)), "every node belongs to a request"
    assert (forest.seq_lens == paths.seq_lens).all()


@given(path_tables())
@example(random_paths(113, 113, 40))
@examples(150)
def test_nodes_are_the_maximal_shared_stretches(paths):
    before = copy.deepcopy(paths)
    check_forest(paths)
    for name in paths.__dataclass_fields__:
        assert np.array_equal(getattr(before, name), getattr(paths, name)), "input is not written"


@pytest.mark.parametrize("seq_len", [12, 11])
def test_a_path_must_leave_the_newest_token_private(seq_len):
    paths = path_table([(-1, 9), (0, 3)], [0, 1, 1], [5, 5, 5])
    paths.seq_lens[2] = seq_len
    with pytest.raises(ValueError, match=r"paths\[2\] holds 12 tokens but seq_lens\[2\] is 1[12]"):
        build_forest(paths)
