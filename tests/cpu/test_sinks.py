"""Attention sinks over plans run in torch: a full softmax with one more logit a head."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sgl_prefix_attn.execute import interpreter
from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table, planner
from tests.support.multi_token import multi_token
from tests.support.poison import POISONS, assert_contained, forest, poisoned
from tests.support.problems import make_problem
from tests.support.running import append, loaded, plan_wrapper, planned_several, run, wrapper_of
from tests.support.sinks import sinks_of

BITS, RANGES = HeadConfig(8, 2, 64), HeadConfig(2, 2, 64)  # keys of bits and of rows
PATHS = path_table([(-1, 700), (0, 70)], [1, 1, 0, 0, -1], [1, 63, 64, 5, 900])


def plans_of(problem):
    """Of whole tiles, of split ones, and of nodes that are split off."""
    made = Planner(problem.heads, num_sms=16, headroom=3)
    tree = build_forest(problem.paths)
    cuts = sorted(made.cuts(tree), key=lambda cut: int(cut.parts.max()))
    assert cuts[0].parts.max() == 1 < cuts[-1].parts.max()
    for cut in (cuts[0], cuts[-1]):
        yield made.serialize(tree, cut)
    yield planner(problem.heads, "naive", headroom=3).plan(problem.paths)


def softmax_with_sinks(problem):
    """In float64: out [B, Hq, D] and the LSE [B, Hq] in base 2."""
    outs, lses = [], []
    for row, slots in enumerate(problem.slots()):
        group = problem.heads.group_size
        k, v = (c[slots].double().repeat_interleave(group, 1) for c in (problem.k, problem.v))
        logits = torch.einsum("hd,thd->ht", problem.q[row].double(), k) * problem.sm_scale
        if problem.soft_cap:
            logits = problem.soft_cap * torch.tanh(logits / problem.soft_cap)
        logits = torch.cat([logits, problem.sinks[:, None].double()], 1)
        outs.append(torch.einsum("ht,thd->hd", logits.softmax(1)[:, :-1], v))
        lses.append(logits.logsumexp(1) / math.log(2))
    return torch.stack(outs), torch.stack(lses)


def assert_sinks(problem, out, lse):
    want, want_lse = softmax_with_sinks(problem)
    assert (out - want).abs().max() <= 2e-6
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=2e-6)


def problem_of(heads, **options):
    return replace(make_problem(PATHS, heads, **options), sinks=sinks_of(heads))


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("heads", [BITS, RANGES, HeadConfig(7, 1, 128)], ids=str)
def test_sinks_over_growth(heads, soft_cap):
    for i in range(3):
        problem = problem_of(heads, soft_cap=soft_cap)
        made = loaded(problem, [*plans_of(problem)][i])
        assert_sinks(problem, *run(made, problem))
        generator = torch.Generator().manual_seed(7)
        for _ in range(3):
            append(made, problem, problem.grow(generator))
        assert_sinks(problem, *run(made, problem))


@pytest.mark.parametrize("sink", [40.0, -40.0, -math.inf])
@pytest.mark.parametrize("sign", [1, -1])
def test_sinks_far_from_scores_of_either_sign(sink, sign):
    problem = problem_of(BITS)
    problem.k, problem.q = problem.k.abs(), sign * problem.q.abs()
    problem.sinks = torch.full((8,), sink)
    for plan in plans_of(problem):
        out, lse = run(loaded(problem, plan), problem)
        assert lse.isfinite().all()
        assert_sinks(problem, out, lse)
        if sink < 0:  # nothing but what there is without sinks
            without = replace(problem, sinks=None)
            weight = torch.exp2(sink / math.log(2) - lse.max())
            torch.testing.assert_close(
                out, run(loaded(without, plan), without)[0], rtol=0, atol=2e-6 + 4 * float(weight)
            )


def test_several_tokens_a_request():
    asked = multi_token(PATHS, [3, 1, 2, 7, 1], BITS, torch.float32)
    queries = replace(asked.queries, sinks=sinks_of(BITS))
    made = planned_several(asked)
    out, lse = made.run(queries.q, (queries.k, queries.v), return_lse=True, sinks=queries.sinks)
    assert_sinks(queries, out, lse.values)


@pytest.mark.parametrize("name", ["private V", "K of a node that some share"])
def test_a_nan_stays_with_its_requests(name):
    problem = make_problem(forest(), BITS)
    problem.sinks = sinks_of(BITS)
    bad = poisoned(problem, POISONS[name])
    for strategy in ("calibrated", "naive"):
        plan = planner(BITS, strategy).plan(problem.paths)
        assert_contained(problem, bad, *run(loaded(bad, plan), bad))


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_the_ground_truth_knows_sinks(soft_cap):
    problem = problem_of(BITS, soft_cap=soft_cap)
    out, lse = full_attention(
        problem.q, problem.k, problem.v, problem.req_to_token, problem.pool, problem.seq_lens,
        sm_scale=problem.sm_scale, logits_soft_cap=soft_cap, sinks=problem.sinks,
        dtype=torch.float32,
    )  # fmt: skip
    assert_sinks(problem, out, lse.values)


def test_the_wrapper_takes_a_layers_sinks():
    problem = problem_of(BITS)
    made = plan_wrapper(wrapper_of(problem), problem)
    kv = problem.k, problem.v
    out, lse = made.run(problem.q, kv, return_lse=True, sinks=problem.sinks)
    assert_sinks(problem, out, lse.values)
    plain = made.run(problem.q, kv)  # the next layer has none
    off = torch.full((8,), -math.inf)
    torch.testing.assert_close(plain, made.run(problem.q, kv, sinks=off), rtol=0, atol=2e-6)


# --- what must be found ---------------------------------------------------------------------------


def _in_each_part(patch, sinks):
    run_items = interpreter.run_items

    def with_sinks(words, q, k, *args, **options):
        for item, queries, (out, lse) in run_items(words, q, k, *args, **options):
            heads, rows = lse.shape
            sink = sinks.double().view(heads, -1).repeat(1, rows * heads // len(sinks))
            total = torch.logaddexp(lse * math.log(2), sink)
            out = out * (lse * math.log(2) - total).exp()[..., None]
            yield item, queries, (out, total / math.log(2))

    patch.setattr(interpreter, "run_items", with_sinks)


def _changed(change):
    write = interpreter._write
    return lambda patch, _: patch.setattr(
        interpreter, "_write", lambda *args: write(*args[:-1], change(args[-1], args[2]))
    )


FAULTS = {
    "in each part": _in_each_part,
    "of the next head": _changed(lambda sinks, _: sinks.roll(-1)),
    "left out of a merge by query": _changed(
        lambda sinks, queries: None if queries.numel() == 1 else sinks
    ),
    "inside the soft cap": _changed(lambda sinks, _: 5 * torch.tanh(sinks / 5)),
    "of all heads": _changed(lambda sinks, _: sinks.logsumexp(0).expand_as(sinks)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_sink_is_found(fault, monkeypatch):
    problem = problem_of(BITS, soft_cap=5.0)
    made = loaded(problem, [*plans_of(problem)][2])
    assert_sinks(problem, *run(made, problem))
    FAULTS[fault](monkeypatch, problem.sinks)
    with pytest.raises(AssertionError):
        assert_sinks(problem, *run(made, problem))


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ([0.0] * 8, "sinks must be a tensor, got list"),
        (torch.zeros(7), r"sinks must have shape \(8,\), got \(7,\)"),
        (torch.zeros(8, 1), r"sinks must have shape \(8,\), got \(8, 1\)"),
        (torch.zeros(8).bfloat16(), "sinks must be float32 .*, got torch.bfloat16"),
        (torch.zeros(8, device="meta"), "sinks must be on the wrapper's device, cpu, got meta"),
        (torch.zeros(16)[::2], r"sinks must be contiguous, got strides \(2,\)"),
    ],
)
def test_the_wrapper_refuses(sinks, message):
    problem = problem_of(BITS)
    made = plan_wrapper(wrapper_of(problem), problem)
    with pytest.raises(ValueError, match=message):
        made.run(problem.q, (problem.k, problem.v), sinks=sinks)
