"""eval.compare_outputs layers without an engine: the judgement."""

from dataclasses import replace

import pytest
import torch

from eval.compare_outputs import dump
from eval.compare_outputs.layer_judgement import judge, not_the_step, three_layers
from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table
from tests.support.problems import make_problem

HEADS = HeadConfig(8, 2, 64)
SHARED = 96


def dump_of(dtype=torch.bfloat16, out_rows=None):
    """Four requests on one node, with tails of different lengths; `out_rows` changes the slots that
    the output is computed from, row by row."""
    paths = path_table([(-1, SHARED)], [0] * 4, [40, 40, 33, 9])
    problem = make_problem(paths, HEADS, dtype)
    rows = problem.req_to_token[problem.pool].long()
    seq_lens = problem.seq_lens.long()
    used = rows if out_rows is None else out_rows(rows.clone(), seq_lens)
    out, _ = full_attention(
        problem.q, problem.k, problem.v, used, torch.arange(4), seq_lens,
        sm_scale=problem.sm_scale, dtype=torch.float32,
    )  # fmt: skip
    slots, index = dump.compact(rows[:, : int(seq_lens.max())], seq_lens)
    return dump.LayerDump(
        q=problem.q, out=out.to(dtype), k=problem.k[slots], v=problem.v[slots], index=index,
        seq_lens=seq_lens, sm_scale=problem.sm_scale, replayed=False,
        decision=["prefix", "default"],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_right_attention_passes(dtype):
    error, error_torch, problem = judge(dump_of(dtype))
    assert problem is None
    assert 0 < error.norm <= error.worst_row and 0 < error_torch.norm <= error_torch.worst_row


def test_the_truth_is_full_attention():
    layer = dump_of(torch.float32)
    truth, _ = full_attention(
        layer.q, layer.k, layer.v, layer.index, torch.arange(4), layer.seq_lens,
        sm_scale=layer.sm_scale,
    )  # fmt: skip
    error, _, _ = judge(replace(layer, out=truth))
    assert error.worst_row < 1e-14


def not_appended(rows, seq_lens):
    """The newest slot of one request was never written: it reads another of its tokens."""
    rows[3, seq_lens[3] - 1] = rows[3, 0]
    return rows


def tails_swapped(rows, _):
    rows[[0, 1], SHARED:] = rows[[1, 0], SHARED:]
    return rows


def half_a_node_twice(rows, _):
    rows[:, : SHARED // 2] = rows[:, SHARED // 2 : SHARED]
    return rows


@pytest.mark.parametrize("fault", [not_appended, tails_swapped, half_a_node_twice])
def test_wrong_slots_are_wrong(fault):
    _, _, problem = judge(dump_of(out_rows=fault))
    assert problem is not None and "rounding explains" in problem


def test_another_shape_is_refused():
    layer = dump_of()
    with pytest.raises(ValueError, match="output is"):
        judge(replace(layer, out=layer.out[:3]))


@pytest.mark.parametrize(
    ("backend", "graphs", "change", "says"),
    [
        ("prefix", False, {}, None),
        ("prefix", True, {"replayed": True}, None),
        ("prefix", True, {}, "eagerly"),
        ("flashinfer", True, {"decision": None}, "eagerly"),
        ("flashinfer", False, {"decision": None}, None),
        ("fa3/prefix", False, {"decision": None}, "without the prefix kernels"),
        ("prefix", False, {"decision": ["stock", "planner_error"]}, "planner_error"),
    ],
)
def test_only_the_step_meant_is_judged(backend, graphs, change, says):
    problem = not_the_step(replace(dump_of(), **change), backend, graphs)
    assert problem is None if says is None else says in problem


def test_first_middle_and_last_layer():
    assert three_layers(4) == [0, 2, 3]
    assert three_layers(3) == [0, 1, 2]
