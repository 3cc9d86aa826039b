"""The library API for several tokens a request: plan, run, refuse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_prefix_attn
from sgl_prefix_attn import PrefixAttentionWrapper, PrefixDecodeWrapper
from sgl_prefix_attn.execute.backends import choice
from sgl_prefix_attn.execute.backends.torch_row_tiles import TorchRowTiles
from sgl_prefix_attn.execute.lse import Lse
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table
from tests.support.multi_token import CHAIN_FAULTS, asked_paths, multi_token
from tests.support.problems import assert_attention
from tests.support.running import paths_of

HEADS = HeadConfig(8, 2, 32)


def wrapper(heads=HEADS, dtype=torch.float32, **options) -> PrefixAttentionWrapper:
    sizes = (heads.num_qo_heads, heads.num_kv_heads, heads.head_dim)
    return PrefixAttentionWrapper(*sizes, device="cpu", dtype=dtype, **options)


def planned(asked, **options) -> PrefixAttentionWrapper:
    requests = asked.requests
    made = wrapper(requests.heads, requests.dtype, sm_scale=requests.sm_scale, **options)
    made.plan(
        paths_of(requests.paths), requests.seq_lens, requests.req_to_token, requests.pool,
        query_lens=asked.query_lens,
    )  # fmt: skip
    return made


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
@settings(max_examples=30, deadline=None)
def test_plan_and_run(asked, heads, dtype):
    asked = multi_token(*asked, heads, dtype)
    check(planned(asked), asked)


@given(asked_paths(most=300, lengths=(16, 32, 48)), st.sampled_from([1, 16]))
@settings(max_examples=20, deadline=None)
def test_a_block_table_gives_the_same_attention(asked, page_size):
    asked = multi_token(*asked, HEADS, torch.float32, page_size=page_size)
    requests = asked.requests
    made = wrapper(sm_scale=requests.sm_scale, page_size=page_size)
    table = requests.req_to_token[requests.pool][:, ::page_size] // page_size
    made.plan_block_table(table, requests.seq_lens, asked.query_lens)
    check(made, asked)


def test_without_query_lens_it_decodes():
    asked = multi_token(path_table([(-1, 20)], [0, 0], [3, 4]), [1, 1], HEADS, torch.float32)
    requests = asked.requests
    arguments = (
        paths_of(requests.paths), requests.seq_lens, requests.req_to_token, requests.pool,
    )  # fmt: skip
    made = wrapper(sm_scale=requests.sm_scale)
    made.plan(*arguments)
    check(made, asked)
    decode = PrefixDecodeWrapper(
        8, 2, 32, device="cpu", dtype=torch.float32, sm_scale=requests.sm_scale
    )
    decode.plan(*arguments)
    q, kv = asked.queries.q, (requests.k, requests.v)
    torch.testing.assert_close(made.run(q, kv), decode.run(q, kv))


def test_plans_follow_each_other():
    """Larger (the workspace grows), smaller (it stays), and the slots are the plan's own."""
    made = wrapper(sm_scale=1.5 * 32**-0.5)
    for batch in (2, 30, 3):
        paths = path_table([(-1, 50)], [0] * batch, [9] * batch)
        asked = multi_token(paths, [1 + i % 5 for i in range(batch)], HEADS, torch.float32)
        requests = asked.requests
        slots = requests.req_to_token.clone()
        made.plan(
            paths_of(requests.paths), requests.seq_lens, slots, requests.pool, asked.query_lens
        )
        slots.fill_(0)
        check(made, asked)


@pytest.mark.parametrize("fault", CHAIN_FAULTS.values())
def test_a_planted_fault_is_found(fault):
    asked = multi_token(path_table([(-1, 70)], [0, 0], [9, 9]), [4, 4], HEADS, torch.float32)
    made = planned(asked)
    check(made, asked)
    requests, executor = asked.requests, made._executor
    fault(executor.workspace.words)
    executor.backend.fill(executor.workspace, executor.plan, requests.req_to_token, requests.pool)
    with pytest.raises(AssertionError):
        check(made, asked)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        ([1], "query_lens has 1 rows, seq_lens 2"),
        ([1, 0], r"query_lens\[1\] is 0, must be 1 to seq_lens\[1\], 24"),
        ([24, 1], r"query_lens\[0\] is 24, must be 1 to seq_lens\[0\], 23"),
        ([4, 1], r"paths\[0\] holds 20 tokens but seq_lens\[0\] is 23"),
        ([1.5, 1], "query_lens must be one-dimensional integers"),
    ],
)
def test_bad_query_lens_are_refused(lens, message):
    asked = multi_token(path_table([(-1, 20)], [0, 0], [3, 4]), [1, 1], HEADS, torch.float32)
    with pytest.raises(ValueError, match=message):
        planned(asked._replace(query_lens=lens))


def test_q_must_have_a_row_for_each_query():
    asked = multi_token(path_table([(-1, 20)], [0, 0], [3, 4]), [3, 2], HEADS, torch.float32)
    made = planned(asked)
    with pytest.raises(ValueError, match=r"q must have shape \(5, 8, 32\), got \(4, 8, 32\)"):
        made.run(asked.queries.q[:4], (asked.queries.k, asked.queries.v))
    with pytest.raises(RuntimeError, match="no plan yet"):
        wrapper().run(asked.queries.q, (asked.queries.k, asked.queries.v))


def test_other_devices_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(choice, "why_no_row_tiles", lambda *args: "compute:8.0")
    with pytest.raises(ValueError, match=r"Hopper GPU \(sm_90\) or a CPU; here: compute:8.0"):
        wrapper()


def test_a_cpu_runs_torch():
    assert type(wrapper()._backend) is TorchRowTiles
    assert sgl_prefix_attn.PrefixAttentionWrapper is PrefixAttentionWrapper
