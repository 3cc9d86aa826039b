"""Plans of several tokens a request: the words run in torch give causal attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.execute import interpreter as oracle
from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.leaves import cut_at_requests, order_leaves
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.examples import chosen, examples
from tests.support.forests import path_table, path_tables, random_paths
from tests.support.multi_token import (
    CHAIN_FAULTS,
    QUERY_LENS,
    MultiToken,
    asked_paths,
    multi_token,
)
from tests.support.plan_blocks import poisoned_blocks

HEADS = (
    HeadConfig(8, 2, 8), HeadConfig(7, 1, 8), HeadConfig(2, 2, 8), HeadConfig(16, 1, 8),
    HeadConfig(12, 1, 12, 8),
)  # fmt: skip


def planner(heads: HeadConfig) -> Planner:
    """Of a small GPU, so that few queries fill it and few blocks are split."""
    return Planner(heads, num_sms=16)


def answers(queries):
    return full_attention(
        queries.q, queries.k, queries.v, queries.req_to_token, queries.pool, queries.seq_lens,
        sm_scale=queries.sm_scale, logits_soft_cap=queries.soft_cap,
    )  # fmt: skip


def check(plan, asked: MultiToken, spoil=lambda words: None, full=None) -> None:
    """Every query's output and LSE are full attention's, in fp64, over blocks that were poison."""
    requests, queries = asked.requests, asked.queries
    words = torch.from_numpy(plan.words.copy())
    spoil(words)
    blocks = poisoned_blocks(plan.num_blocks, requests.poison_slot)
    oracle.fill(words, requests.req_to_token, requests.pool, blocks)
    options = {"sm_scale": queries.sm_scale, "logits_soft_cap": queries.soft_cap}
    out, lse = oracle.execute(words, queries.q, queries.k, queries.v, blocks, **options)
    want, want_lse = full or answers(queries)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, want_lse.values, rtol=1e-9, atol=1e-9)


def check_cuts(paths, query_lens, heads, most=4, **options) -> None:
    asked = multi_token(paths, query_lens, heads, torch.float64, **options)
    made = planner(heads)
    forest = build_forest(asked.requests.paths, asked.query_lens)
    cuts = sorted(made.cuts(forest), key=lambda cut: cut.us)
    full = answers(asked.queries)
    for cut in chosen(cuts, most):
        check(made.serialize(forest, cut), asked, full=full)


@given(asked_paths(most=200), st.sampled_from(HEADS), st.sampled_from([0.0, 3.0]))
@examples(25)
def test_every_cut_computes_causal_attention(asked, heads, soft_cap):
    check_cuts(*asked, heads, soft_cap=soft_cap)


MANY = path_table([(-1, 130), (0, 65)], [0, 1, 1, 0, -1, 1, 0, -1] + [1] * 6, [1, 63] * 7)


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_lengths_from_1_to_120_in_one_batch(heads):
    """The longest fill tiles of their own with each of these heads but the third."""
    check_cuts(MANY, [n if n <= 120 else 1 for n in QUERY_LENS], heads, most=3)


@pytest.mark.long
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_lengths_from_1_to_512_in_one_batch(heads):
    check_cuts(MANY, QUERY_LENS, heads, most=3)


@pytest.mark.long
@given(asked_paths(), st.sampled_from(HEADS), st.sampled_from([0.0, 3.0]))
@examples(25)
def test_every_cut_of_long_chains_computes_causal_attention(asked, heads, soft_cap):
    check_cuts(*asked, heads, soft_cap=soft_cap)


@pytest.mark.slow
def test_odd_lengths_that_share_nothing():
    check_cuts(path_table([], [-1] * 3, [1, 63, 4097]), [512, 63, 5], HEADS[1], most=3)


def test_pages():
    paths = random_paths(4, 20, 8, [16, 32, 64])
    check_cuts(paths, 1 + np.arange(20) % 7, HEADS[0], page_size=16)


@given(path_tables(max_batch=40), st.sampled_from(HEADS))
@examples(40)
def test_one_query_each_reads_as_much_as_a_decode_step(paths, heads):
    made = planner(heads)
    decode, one_each = made.plan(paths), made.plan(paths, np.ones(paths.leaf.size, np.int32))
    assert one_each.predicted_us <= decode.predicted_us
    assert one_each.stats.kv_tokens_unique == decode.stats.kv_tokens_unique
    assert one_each.appends_left == 0


@given(asked_paths(), st.sampled_from(HEADS))
@examples(40)
def test_queries_stand_in_runs(asked, heads):
    """Requests' queries side by side and in their order, those below each node in its range."""
    paths, lens = asked
    forest = build_forest(multi_token(paths, lens, heads, torch.float64).requests.paths, lens)
    leaves = order_leaves(forest)
    row = np.repeat(np.arange(lens.size), lens)
    assert sorted(leaves.query.tolist()) == list(range(row.size))
    assert np.array_equal(leaves.request, row[leaves.query])
    same = leaves.request[1:] == leaves.request[:-1]
    assert np.array_equal(same, leaves.after[:-1] > 0)
    assert np.array_equal(leaves.query[1:][same], leaves.query[:-1][same] + 1)
    for node in range(forest.parent.size):
        below = leaves.request[leaves.first[node] : leaves.last[node]]
        under = forest.tail_parent[below]
        while (under != node).any():  # everything below leads to the node
            under = np.where(under == node, node, forest.parent[under])
            assert (under >= 0).all()
        assert np.unique(below).size == forest.num_queries[node]


@pytest.mark.parametrize(
    ("lens", "edges"),
    [
        ([4, 4, 4, 4, 4], [0, 8, 16, 20]),
        ([3, 3, 9, 1, 20, 5], [0, 6, 16, 26, 36, 41]),
        ([25], [0, 8, 16, 25]),
        ([10, 11, 1], [0, 10, 15, 21, 22]),
    ],
)
def test_tiles_of_whole_requests(lens, edges):
    after = np.concatenate([np.arange(n, dtype=np.int32)[::-1] for n in lens])
    assert cut_at_requests(after, 10).tolist() == edges


def test_a_path_into_the_new_tokens_is_refused():
    paths = path_table([(-1, 20)], [0, 0], [3, 3])
    build_forest(paths, np.array([3, 3], np.int32))
    with pytest.raises(ValueError, match=r"paths\[1\] holds 20 tokens but seq_lens\[1\] is 23"):
        build_forest(paths, np.array([3, 4], np.int32))


# --- the check itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("fault", CHAIN_FAULTS.values())
def test_the_check_finds_a_planted_fault(fault, heads):
    asked = multi_token(path_table([(-1, 70)], [0, 0], [9, 9]), [4, 4], heads, torch.float64)
    plan = planner(heads).plan(asked.requests.paths, asked.query_lens)
    assert plan.words[W.H_NUM_ITEMS] >= 1
    check(plan, asked)
    with pytest.raises(AssertionError):
        check(plan, asked, fault)
