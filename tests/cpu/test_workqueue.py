"""The plan's words: read a second time, word by word."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.plan import STRATEGIES
from sgl_prefix_attn.records import HeadConfig
from tests.support import plan_faults
from tests.support.forests import path_table, path_tables, planner, random_paths
from tests.support.plan_faults import FAULTS
from tests.support.plan_words import check_coverage, decode_parts, items, merge_entries, segments

HEADS = [HeadConfig(4, 4, 32), HeadConfig(8, 2, 64), HeadConfig(28, 4, 128), HeadConfig(16, 1, 80)]


def check_queues(plan, heads, tile_set):
    """Items fit their tiles, stand longest first, and are as many as the statistics say."""
    total = 0
    for tile, queue in items(plan):
        total += len(queue)
        if tile >= len(tile_set.tiles):
            assert not len(queue)
            continue
        config = tile_set.tiles[tile]
        times = []
        for item in queue.tolist():
            num_queries = item[L.I_NUM_QUERIES]
            assert num_queries >= 1
            assert num_queries * heads.group_size <= config.block_m
            if config.requests:
                assert item[L.I_LEN] == L.GROWS and num_queries <= config.requests
                first = plan.words[L.H_ENTRIES] + item[L.I_ENTRY] * L.ENTRY_WORDS
                rows = plan.words[first:][: num_queries * L.ENTRY_WORDS : L.ENTRY_WORDS]
                start = plan.words[plan.words[L.H_TAILS] :][rows * L.TAIL_WORDS + L.T_START]
                kv_tokens = int((plan.seq_lens[rows] - start).sum())
            else:
                kv_tokens = item[L.I_LEN]
                assert kv_tokens > 0
            times.append(kv_tokens / item[L.I_NUM_SPLITS])
        assert times == sorted(times, reverse=True), "longest first"
    assert total == plan.stats.num_items


def check_layout(plan, headroom):
    """Sections follow each other without gaps, index segments do not touch, and start aligned."""
    words = plan.words
    assert words.dtype == np.int32 and words[L.H_VERSION] == L.VERSION
    assert words[L.H_BATCH] == plan.batch_size == plan.seq_lens.size
    queues = range(L.H_QUEUES, L.HEADER_WORDS, 2)
    at = L.HEADER_WORDS
    for section, size in (
        (L.H_SEGMENTS, words[L.H_NUM_SEGMENTS] * L.SEGMENT_WORDS),
        (L.H_TAILS, plan.batch_size * L.TAIL_WORDS),
        (L.H_ENTRIES, plan.packs.queries.size * L.ENTRY_WORDS),
        (L.H_MERGES, words[L.H_NUM_MERGES] * L.MERGE_WORDS),
        *((queue, words[queue + 1] * L.ITEM_WORDS) for queue in queues),
    ):
        assert words[section] == at
        at += size
    assert at == words.size
    end = 0
    tails = words[words[L.H_TAILS] :][: plan.batch_size * L.TAIL_WORDS].reshape(-1, L.TAIL_WORDS)
    room_at = dict(tails.tolist())
    assert len(room_at) == plan.batch_size, "every tail has a segment of its own"
    for dst, row, start, length in segments(words).tolist():
        assert dst >= end and dst % 16 == 0 and length > 0
        assert 0 <= row < plan.batch_size and start + length <= plan.seq_lens[row]
        end = dst + length
        if dst in room_at:
            assert room_at.pop(dst) == start
            end += headroom
    assert not room_at
    assert end <= plan.num_index_slots
    assert plan.appends_left == headroom


def check_stats(plan, paths):
    stats = plan.stats
    assert stats.kv_tokens_query_centric == paths.seq_lens.sum()
    assert stats.kv_tokens_read == segments(plan.words)[:, L.S_LEN].sum()
    assert stats.num_packs == len(segments(plan.words))
    below = np.zeros(paths.parent.size, int)
    private = paths.seq_lens.astype(int)
    for row in range(paths.leaf.size):
        node = paths.leaf[row]
        while node >= 0:
            below[node] += 1
            private[row] -= paths.length[node]
            node = paths.parent[node]
    assert stats.kv_tokens_unique == paths.length[below > 0].sum() + private.sum()
    assert stats.num_partials == plan.num_partials
    assert stats.num_nodes == plan.forest.parent.size


def check_plan(plan, paths, heads, tile_set, headroom):
    check_layout(plan, headroom)
    check_queues(plan, heads, tile_set)
    check_stats(plan, paths)
    for grown in {0, min(1, headroom), headroom // 2, headroom}:
        check_coverage(plan, paths, grown)


@given(
    path_tables(),
    st.sampled_from(HEADS),
    st.sampled_from(STRATEGIES),
    st.sampled_from([0, 1, 20, 64]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_every_position_of_every_request_is_read_once(
    paths, heads, strategy, headroom, split, packed
):
    make = planner(heads, strategy, headroom, split, packed)
    check_plan(make.plan(paths), paths, heads, make.tile_set, headroom)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_large_batches(strategy):
    paths = random_paths(113, 113, 30, lengths=(1, 16, 63, 300))
    make = planner(HEADS[1], strategy)
    check_plan(make.plan(paths), paths, HEADS[1], make.tile_set, 20)


def test_long_kv_is_split_and_stays_covered():
    paths = path_table([(-1, 4097)], [0, 0, 0, -1], [1, 63, 4097, 4097])
    make = planner(HEADS[1], "naive")
    plan = make.plan(paths)
    check_plan(plan, paths, HEADS[1], make.tile_set, 20)
    splits = {item[L.I_NUM_SPLITS] for _, queue in items(plan) for item in queue.tolist()}
    assert max(splits) > 4


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_a_planted_fault(fault):
    paths = plan_faults.tree()
    plan = planner(HEADS[1], "naive").plan(paths)
    check_coverage(plan, paths)
    fault(plan)
    with pytest.raises((AssertionError, IndexError)):
        check_coverage(plan, paths)


def test_parts_of_a_hand_made_plan():
    """Two requests share 20 tokens and have tails of 3 and 5: three packs, two parts each."""
    paths = path_table([(-1, 20)], [0, 0], [3, 5])
    plan = planner(HEADS[1], "naive", headroom=4, split=False, packed=False).plan(paths)
    # segments: shared 0-19; tails from 32 (3 + 4 entries) and 48 (5 + 4)
    assert segments(plan.words).tolist() == [[0, 0, 0, 20], [32, 0, 20, 3], [48, 1, 20, 5]]
    assert merge_entries(plan.words).tolist() == [[0, 0, 2, 0], [1, 2, 2, 0]]
    got = sorted((p.row, p.slot, p.begin, p.end) for p in decode_parts(plan.words, [23, 25]))
    assert got == [(0, 0, 0, 20), (0, 1, 32, 35), (1, 2, 0, 20), (1, 3, 48, 53)]
    assert plan.num_index_slots == 64 and plan.num_partials == 4
