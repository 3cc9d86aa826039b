"""The library API: plan, append, run, explain."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_prefix_attn
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.lse import Lse
from sgl_prefix_attn.plan import STRATEGIES
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table, path_tables
from tests.support.problems import assert_attention, make_problem
from tests.support.running import paths_of, plan_wrapper, planned_wrapper, wrapper

HEADS = HeadConfig(8, 2, 32)


def run(made, problem):
    out, lse = made.run(problem.q, (problem.k, problem.v), return_lse=True)
    assert isinstance(lse, Lse) and lse.base == "2"
    assert_attention(problem, out, lse.values)
    return out


@given(
    path_tables(),
    st.sampled_from([HEADS, HeadConfig(28, 4, 32), HeadConfig(7, 1, 80)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from(STRATEGIES),
)
@settings(max_examples=60, deadline=None)
def test_plan_append_run(table, heads, dtype, strategy):
    problem = make_problem(table, heads, dtype)
    made = planned_wrapper(problem, strategy=strategy)
    run(made, problem)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        made.append(problem.grow(generator))
        run(made, problem)


@given(path_tables(lengths=(16, 32, 48)), st.sampled_from([1, 16]))
@settings(max_examples=40, deadline=None)
def test_a_block_table_gives_the_same_plan(table, page_size):
    """Wherever the tree's nodes are whole pages and tails have different pages."""
    problem = make_problem(table, HEADS, page_size=page_size)
    by_paths = planned_wrapper(problem)
    by_table = wrapper(HEADS, sm_scale=problem.sm_scale, page_size=page_size)
    block_table = problem.req_to_token[problem.pool][:, ::page_size] // page_size
    by_table.plan_block_table(block_table, problem.seq_lens)

    def packs(made):
        return sorted(sorted(p.items()) for p in made.explain()["packs"])

    assert packs(by_table) == packs(by_paths)
    assert torch.equal(run(by_table, problem), run(by_paths, problem))
    slots = problem.grow(torch.Generator().manual_seed(1))
    by_paths.append(slots)
    by_table.append(slots)
    assert torch.equal(run(by_table, problem), run(by_paths, problem))


def test_lengths_and_rows_may_be_lists_and_int64():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = wrapper(HEADS, sm_scale=problem.sm_scale)
    slots = problem.req_to_token.long()
    made.plan([[(5, 20)], [(5, 20)]], problem.seq_lens.tolist(), slots, problem.pool.tolist())
    run(made, problem)


def test_soft_cap_and_default_scale():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS, soft_cap=5.0)
    made = wrapper(HEADS, sm_scale=problem.sm_scale, logits_soft_cap=5.0)
    made.plan([[(5, 20)]] * 2, problem.seq_lens, problem.req_to_token, problem.pool)
    run(made, problem)
    problem.soft_cap, problem.sm_scale = 0.0, 32**-0.5
    made = wrapper(HEADS)
    made.plan([[(5, 20)]] * 2, problem.seq_lens, problem.req_to_token, problem.pool)
    run(made, problem)


def test_out_is_written_in_place():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = planned_wrapper(problem)
    out = torch.full_like(problem.q, math.nan)
    assert made.run(problem.q, (problem.k, problem.v), out=out) is out
    assert_attention(problem, out)
    given_out, lse = made.run(problem.q, (problem.k, problem.v), out=out, return_lse=True)
    assert given_out is out and lse.values.shape == (2, HEADS.num_qo_heads)


def test_plans_follow_each_other():
    """Larger (the workspace grows), smaller (it stays), and the slots are the plan's own."""
    made = wrapper(HEADS, sm_scale=1.5 * 32**-0.5)
    for batch in (2, 30, 3):
        problem = make_problem(path_table([(-1, 50)], [0] * batch, [9] * batch), HEADS, seed=batch)
        slots = problem.req_to_token.clone()
        made.plan(paths_of(problem.paths), problem.seq_lens, slots, problem.pool)
        slots.fill_(0)
        run(made, problem)
        made.append(problem.grow(torch.Generator().manual_seed(batch)))
        run(made, problem)


def test_lengths_stay_where_a_captured_graph_reads_them(monkeypatch):
    layers = []
    monkeypatch.setattr(
        TorchBackend, "forward", lambda self, workspace, layer: layers.append(layer)
    )
    made = wrapper(HEADS)
    for batch in (5, 3, 5):
        problem = make_problem(path_table([(-1, 50)], [0] * batch, [9] * batch), HEADS)
        plan_wrapper(made, problem)
        made.run(problem.q, (problem.k, problem.v))
        made.append(problem.last_slots(1))
        made.run(problem.q, (problem.k, problem.v))
    assert len({layer.seq_lens.data_ptr() for layer in layers}) == 1


def test_a_refused_plan_leaves_the_current_one():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS)
    made = planned_wrapper(problem)
    made.append(problem.grow(torch.Generator().manual_seed(1)))
    other = make_problem(path_table([(-1, 30)], [0, 0, 0], [3, 4, 5]), HEADS)
    other.req_to_token[other.pool[1], 7] = 0  # a shared slot that differs
    with pytest.raises(ValueError, match="slots in req_to_token differ"):
        made.plan(paths_of(other.paths), other.seq_lens, other.req_to_token, other.pool)
    run(made, problem)
    assert made.explain()["appended"] == 1


def test_explain():
    problem = make_problem(path_table([(-1, 20)], [0, 0, -1], [3, 4, 7]), HEADS)
    made = planned_wrapper(problem, strategy="naive")
    made.append(problem.grow(torch.Generator().manual_seed(1)))
    plan = made.explain()
    assert plan.pop("num_items") == 4
    assert plan == {
        "strategy": "naive",
        "batch_size": 3,
        "appended": 1,
        "num_nodes": 1,
        "num_packs": 4,
        "num_partials": 4,
        "kv_tokens_read": 20 + 3 + 4 + 7,
        "kv_tokens_query_centric": 23 + 24 + 7,
        "kv_tokens_unique": 34,
        "packs": [
            {"queries": [0, 1], "kv_start": 0, "kv_end": 20, "grows": False},
            {"queries": [0], "kv_start": 20, "kv_end": 24, "grows": True},
            {"queries": [1], "kv_start": 20, "kv_end": 25, "grows": True},
            {"queries": [2], "kv_start": 0, "kv_end": 8, "grows": True},
        ],
    }


def test_headroom_is_a_hard_limit():
    problem = make_problem(path_table([(-1, 20)], [0, 0], [3, 4]), HEADS, room=70)
    made = planned_wrapper(problem)
    generator = torch.Generator().manual_seed(1)
    for _ in range(64):
        made.append(problem.grow(generator))
    run(made, problem)
    with pytest.raises(RuntimeError, match="headroom of 64 tokens is full: call plan"):
        made.append(torch.tensor([1, 2]))
    run(made, problem)  # the refused append changed nothing
    made.plan(paths_of(problem.paths), problem.seq_lens, problem.req_to_token, problem.pool)
    made.append(problem.grow(generator))
    run(made, problem)


@pytest.mark.parametrize("call", ["append", "run", "explain"])
def test_before_plan(call):
    arguments = {
        "append": (torch.tensor([1]),),
        "run": (torch.zeros(1, 8, 32), (torch.zeros(2, 2, 32), torch.zeros(2, 2, 32))),
        "explain": (),
    }
    with pytest.raises(RuntimeError, match="no plan yet"):
        getattr(wrapper(HEADS), call)(*arguments[call])


def test_exported():
    assert sgl_prefix_attn.Lse is Lse
