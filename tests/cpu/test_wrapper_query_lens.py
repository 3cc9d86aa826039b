"""The library API for several tokens a request, beside steps that decode."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.lse import Lse
from sgl_prefix_attn.records import HeadConfig
from tests.support.examples import examples
from tests.support.forests import path_table
from tests.support.multi_token import CHAIN_FAULTS, asked_paths, multi_token
from tests.support.problems import assert_attention, make_problem
from tests.support.running import (
    paths_of,
    plan_several,
    plan_wrapper,
    planned_several,
    wrapper,
    wrapper_of,
)
from tests.support.torch_hopper import TorchHopper, wrappers_as_on_hopper

HEADS = HeadConfig(8, 2, 32)


@pytest.fixture(scope="module", params=[TorchBackend, TorchHopper], autouse=True)
def kernels(request):
    """What wrappers run by themselves; torch stands for the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param is TorchHopper:
            wrappers_as_on_hopper(patch)
        yield request.param


def two_requests(query_lens):
    """Two requests below one node of 20 tokens."""
    return multi_token(path_table([(-1, 20)], [0, 0], [3, 4]), query_lens, HEADS, torch.float32)


def check(made, asked) -> None:
    queries = asked.queries
    out = torch.full_like(queries.q, math.nan)
    given_out, lse = made.run(queries.q, (queries.k, queries.v), out=out, return_lse=True)
    assert given_out is out and isinstance(lse, Lse) and lse.base == "2"
    assert_attention(queries, out, lse.values)


@given(
    asked_paths(most=400),
    st.sampled_from([HEADS, HeadConfig(28, 4, 32), HeadConfig(7, 1, 80), HeadConfig(16, 1, 16)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@examples(30)
def test_plan_and_run(asked, heads, dtype):
    asked = multi_token(*asked, heads, dtype)
    made = planned_several(asked)
    check(made, asked)


@given(asked_paths(most=300, lengths=(16, 32, 48)), st.sampled_from([1, 16]))
@examples(20)
def test_a_block_table_gives_the_same_attention(asked, page_size):
    asked = multi_token(*asked, HEADS, torch.float32, page_size=page_size)
    requests = asked.requests
    made = wrapper_of(requests, page_size=page_size)
    table = requests.req_to_token[requests.pool][:, ::page_size] // page_size
    made.plan_block_table(table, requests.seq_lens, asked.query_lens)
    check(made, asked)


def test_steps_of_both_kinds_follow_each_other(kernels):
    """Larger (the workspace grows), smaller (it stays), and the slots are the plan's own."""
    made = wrapper(HEADS, sm_scale=1.5 * 32**-0.5)
    for batch in (2, 30, 3):
        paths = path_table([(-1, 50)], [0] * batch, [9] * batch)
        asked = multi_token(paths, [1 + i % 5 for i in range(batch)], HEADS, torch.float32)
        of, slots = asked.requests, asked.requests.req_to_token.clone()
        made.plan(paths_of(of.paths), of.seq_lens, slots, of.pool, asked.query_lens)
        slots.fill_(0)
        check(made, asked)

        problem = make_problem(paths, HEADS, seed=batch)
        plan_wrapper(made, problem)
        assert type(made._executor.backend) is kernels
        for _ in range(2):
            assert_attention(problem, made.run(problem.q, (problem.k, problem.v)))
            made.append(problem.grow(torch.Generator().manual_seed(batch)))
        assert made.explain()["appended"] == 2


def test_a_refused_plan_leaves_the_current_one():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = plan_wrapper(wrapper_of(problem), problem)
    made.append(problem.grow(torch.Generator().manual_seed(1)))
    asked = two_requests([3, 2])
    asked.requests.req_to_token[asked.requests.pool[1], 7] = 0  # a shared slot that differs
    with pytest.raises(ValueError, match="slots in req_to_token agree"):
        plan_several(made, asked)
    assert_attention(problem, made.run(problem.q, (problem.k, problem.v)))
    made.append(problem.grow(torch.Generator().manual_seed(2)))
    assert_attention(problem, made.run(problem.q, (problem.k, problem.v)))


@pytest.mark.parametrize("fault", CHAIN_FAULTS.values())
def test_a_planted_fault_is_found(fault):
    asked = multi_token(path_table([(-1, 70)], [0, 0], [9, 9]), [4, 4], HEADS, torch.float32)
    made = planned_several(asked)
    check(made, asked)
    requests, executor = asked.requests, made._executor
    fault(executor.workspace.words)
    executor.backend.fill(executor.workspace, executor.plan, requests.req_to_token, requests.pool)
    with pytest.raises(AssertionError):
        check(made, asked)


def test_explain_names_requests_not_their_tokens():
    asked = multi_token(path_table([(-1, 64)], [0, 0, -1], [3, 4, 7]), [3, 2, 2], HEADS,
                        torch.float32)  # fmt: skip
    plan = planned_several(asked).explain()
    assert (plan["strategy"], plan["batch_size"], plan["appended"]) == ("calibrated", 3, 0)
    assert {r for tile in plan["tiles"] for r in tile["requests"]} == {0, 1, 2}
    read = {r: set() for r in range(3)}
    for tile in plan["tiles"]:
        assert len(set(tile["requests"])) == len(tile["requests"])
        for run in tile["runs"]:
            assert set(run["requests"]) <= set(tile["requests"])
            for request in run["requests"]:
                read[request] |= set(range(run["start"], run["end"]))
    assert read == {r: set(range(n)) for r, n in enumerate(asked.requests.seq_lens.tolist())}


def test_steps_with_query_lens_do_not_grow():
    for query_lens in ([1, 1], [3, 2]):
        made = planned_several(two_requests(query_lens))
        with pytest.raises(RuntimeError, match=r"serves one step: call plan\(\) again"):
            made.append(torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        ([1], "query_lens must have as many rows as seq_lens, 2, got 1"),
        ([1, 0], r"query_lens\[1\] must be 1 to 24, got 0"),
        ([24, 1], r"query_lens\[0\] must be 1 to 23, got 24"),
        ([4, 1], r"paths\[0\] must hold at most 19 of the 23 tokens in seq_lens\[0\].* got 20"),
        ([1.5, 1], r"query_lens must be one-dimensional integers, got float64 \(2,\)"),
    ],
)
def test_bad_query_lens_are_refused(lens, message):
    with pytest.raises(ValueError, match=message):
        planned_several(two_requests([1, 1])._replace(query_lens=lens))


def test_q_must_have_a_row_for_each_query():
    asked = two_requests([3, 2])
    made = planned_several(asked)
    with pytest.raises(ValueError, match=r"q must have shape \(5, 8, 32\), got \(4, 8, 32\)"):
        made.run(asked.queries.q[:4], (asked.queries.k, asked.queries.v))
