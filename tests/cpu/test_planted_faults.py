"""The comparison with full attention must fail where a plan or an executor is wrong."""

import math

import pytest
import torch

from sgl_prefix_attn.execute import reference
from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table, planner
from tests.support.plan_words import segments
from tests.support.problems import assert_attention, make_problem
from tests.support.running import executor, run

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drop_shared_pack(words, monkeypatch):
    tile = max(t for t in range(L.MAX_TILES) if words[L.H_QUEUES + 2 * t + 1] > 0)
    words[L.H_QUEUES + 2 * tile + 1] -= 1


def swap_tail_segments(words, monkeypatch):
    tails = words[words[L.H_TAILS] :]
    tails[[L.T_DST, L.TAIL_WORDS + L.T_DST]] = tails[[L.TAIL_WORDS + L.T_DST, L.T_DST]]


def skip_last_shared_token(words, monkeypatch):
    for tile in range(L.MAX_TILES):
        first, count = words[L.H_QUEUES + 2 * tile :][:2]
        for item in words[first:][: count * L.ITEM_WORDS].reshape(-1, L.ITEM_WORDS):
            if item[L.I_LEN] != L.GROWS:
                item[L.I_LEN] -= 1


def shift_shared_segment(words, monkeypatch):
    segments(words)[0, L.S_START] += 1


def wrong_row(words, monkeypatch):
    segments(words)[-1, L.S_ROW] = 0


def off_by_one_in_splits(words, monkeypatch):
    correct = reference._stretch

    def stretch(item, segment, length):
        found = correct(item, segment, length)
        return slice(found.start + (item[L.I_SPLIT] > 0), found.stop)

    monkeypatch.setattr(reference, "_stretch", stretch)


def overlapping_splits(words, monkeypatch):
    correct = reference._stretch

    def stretch(item, segment, length):
        found = correct(item, segment, length)
        return slice(found.start - (item[L.I_SPLIT] > 0), found.stop)

    monkeypatch.setattr(reference, "_stretch", stretch)


def merge_with_the_wrong_base(words, monkeypatch):
    correct = reference._merge

    def merge(words, partial_out, partial_lse, out, lse):
        correct(words, partial_out, partial_lse * math.log(2), out, lse)

    monkeypatch.setattr(reference, "_merge", merge)


def merge_partials_of_the_next_row(words, monkeypatch):
    words[words[L.H_MERGES] + L.M_PARTIAL] += 1


def merge_the_second_split_twice(words, monkeypatch):
    correct = reference._merge

    def merge(words, partial_out, partial_lse, out, lse):
        partial_lse[0], partial_out[0] = partial_lse[1], partial_out[1]
        correct(words, partial_out, partial_lse, out, lse)

    monkeypatch.setattr(reference, "_merge", merge)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "fault",
    [
        drop_shared_pack, swap_tail_segments, skip_last_shared_token, shift_shared_segment,
        wrong_row, off_by_one_in_splits, overlapping_splits, merge_with_the_wrong_base,
        merge_partials_of_the_next_row, merge_the_second_split_twice,
    ],
)  # fmt: skip
def test_the_comparison_finds_a_planted_fault(fault, dtype, monkeypatch):
    heads = HeadConfig(8, 2, 64)
    paths = path_table([(-1, 130), (0, 40)], [1, 1, 0, 1, -1], [33, 33, 60, 35, 36])
    problem = make_problem(paths, heads, dtype)
    plan = planner(heads, "naive").plan(paths)
    made = executor(problem, plan)
    made.load(plan, problem.req_to_token, problem.pool)
    assert_attention(problem, *run(made, problem))
    fault(plan.words, monkeypatch)
    made = executor(problem, plan)
    made.load(plan, problem.req_to_token, problem.pool)
    out, lse = run(made, problem)
    with pytest.raises(AssertionError):
        assert_attention(problem, out)
    with pytest.raises(AssertionError):
        assert_attention(problem, out, lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_comparison_finds_a_missing_append(dtype):
    """Forgotten: the entry is poison. Forgotten after a longer request held it: a stale slot."""
    heads = HeadConfig(8, 2, 64)
    paths = path_table([(-1, 130)], [0, 0, 0], [33, 33, 60])
    problem = make_problem(paths, heads, dtype)
    plan = planner(heads, "naive").plan(paths)
    made = executor(problem, plan)
    made.load(plan, problem.req_to_token, problem.pool)
    last = problem.req_to_token[problem.pool, (problem.seq_lens - 1).long()]
    problem.grow(torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError):
        assert_attention(problem, run(made, problem)[0])
    made.append(problem.seq_lens, last)
    with pytest.raises(AssertionError):
        assert_attention(problem, run(made, problem)[0])
