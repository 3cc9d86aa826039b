"""The comparison on the GPU must fail under planted faults, in every dtype it passes without."""

from dataclasses import replace

import pytest
import torch

from eval.compare_outputs.faults import with_two_tails_swapped, without_largest_shared
from sgl_prefix_attn import plan as plan_module
from sgl_prefix_attn.kernels import layout as L
from tests.support.forests import path_table
from tests.support.gpu_problems import gpu_problem, grow, loaded, planner, run
from tests.support.problems import assert_attention

DTYPES = [torch.bfloat16, torch.float16]


def tree():
    return path_table([(-1, 130), (0, 40)], [1, 1, 0, 1, -1], [33, 33, 60, 35, 36])


def drop_shared_pack(paths, monkeypatch):
    make_packs = plan_module.make_packs
    monkeypatch.setattr(
        plan_module, "make_packs", lambda *args: without_largest_shared(make_packs(*args))
    )
    return planner(strategy="naive").plan(paths)


def swap_tails(paths, monkeypatch):
    good = planner(strategy="naive").plan(paths)
    return replace(good, words=with_two_tails_swapped(good))


def drop_last_shared_token(paths, monkeypatch):
    good = planner(strategy="naive").plan(paths)
    words = good.words.copy()
    for first, count in words[L.H_QUEUES : L.HEADER_WORDS].reshape(-1, 2):
        for item in words[first:][: count * L.ITEM_WORDS].reshape(-1, L.ITEM_WORDS):
            if item[L.I_LEN] != L.GROWS:
                item[L.I_LEN] -= 1
    return replace(good, words=words)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", [drop_shared_pack, swap_tails, drop_last_shared_token])
def test_a_faulty_plan_is_found(fault, dtype, monkeypatch):
    paths = tree()
    problem = gpu_problem(paths, dtype=dtype)
    assert_attention(problem, *run(loaded(problem, planner(strategy="naive").plan(paths)), problem))
    out, lse = run(loaded(problem, fault(paths, monkeypatch)), problem)
    with pytest.raises(AssertionError):
        assert_attention(problem, out)
    with pytest.raises(AssertionError):
        assert_attention(problem, out, lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_skipped_append_is_found(dtype):
    """Not written at all (poison), and written with the slot of the step before."""
    paths = tree()
    problem = gpu_problem(paths, dtype=dtype)
    made = loaded(problem, planner().plan(paths))
    rows = problem.req_to_token[problem.pool]
    stale = rows.gather(1, problem.seq_lens.long()[:, None] - 1).flatten().long()
    slots = grow(problem, torch.Generator().manual_seed(3))
    with pytest.raises(AssertionError):
        assert_attention(problem, run(made, problem)[0])
    made.append(problem.seq_lens, stale)
    with pytest.raises(AssertionError):
        assert_attention(problem, run(made, problem)[0])
    made.append(problem.seq_lens, slots)
    assert_attention(problem, *run(made, problem))
