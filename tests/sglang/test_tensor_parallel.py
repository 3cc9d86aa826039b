"""Two tensor-parallel ranks of a real CPU engine decide alike, also when one of them fails."""

import os

import pytest

from sgl_prefix_attn.step.policy import STOCK_STEPS
from tests.sglang.engine import STOCK, Config
from tests.sglang.test_outputs import REFERENCE

pytestmark = [pytest.mark.engine, pytest.mark.long]

SCENARIO = "staggered"  # shares, splits, joins and leaves
# The fourth and the fifth plan of the scenario fail, on rank 1 alone.
ONE_FAILS = "planner_error_rank1:3:5"
ONE_FAILS_UNHEARD = f"{ONE_FAILS},no_agreement"

CPUS = sorted(os.sched_getaffinity(0))
RANKS = Config(
    "two_ranks",
    tuple((SCENARIO, fault) for fault in ("", ONE_FAILS, ONE_FAILS_UNHEARD)),
    {"tp_size": 2},
    {
        # Without a NUMA node for each rank SGLang must be told their cores.
        "SGLANG_CPU_OMP_THREADS_BIND": f"{CPUS[0]}|{CPUS[-1]}",
        "PREFIX_ATTN_HEADROOM": "5",
    },
)


@pytest.fixture
def expected(engines):
    return engines.run(REFERENCE, STOCK).outputs[SCENARIO, ""]


@pytest.fixture
def run(engines):
    return engines.run(RANKS)


def ranks_steps(run, fault):
    """Steps of rank 0 and of rank 1, each in its own order."""
    steps = run.steps[SCENARIO, fault]
    return tuple([step for step in steps if step["rank"] == rank] for rank in range(2))


def sequence(steps, *fields):
    return [tuple(step[field] for field in fields) for step in steps]


def same_prefix_steps(run):
    """Steps of rank 0, which ran prefix kernels in all of them, as rank 1 did."""
    first, second = ranks_steps(run, "")
    assert first and set(sequence(first, "variant")) == {("prefix",)}
    fields = ("variant", "reason", "requests", "seq_lens", "causes", "nodes", "read")
    assert sequence(first, *fields) == sequence(second, *fields)
    return first


def test_both_ranks_run_the_same_prefix_steps_with_the_stock_outputs(run, expected):
    assert run.outputs[SCENARIO, ""] == expected
    first = same_prefix_steps(run)
    assert set(sequence(first, "reason")) == {("default",)}
    # What makes the comparison worth something: sharing, and looks for several causes.
    assert max(step["nodes"] or 0 for step in first) >= 3
    causes = {cause for step in first for cause in step["causes"]}
    assert causes >= {"composition", "mapping", "headroom"}


def test_a_planner_error_on_one_rank_makes_the_step_stock_on_both(run, expected):
    assert run.outputs[SCENARIO, ONE_FAILS] == expected
    first, second = ranks_steps(run, ONE_FAILS)
    assert sequence(first, "variant", "requests") == sequence(second, "variant", "requests")
    both = (sequence(steps, "variant", "reason") for steps in (first, second))
    decisions = list(zip(*both, strict=True))
    agreed = (("prefix", "default"),) * 2
    failed = (("stock", "other_rank"), ("stock", "planner_error"))
    at = decisions.index(failed)
    # A failed look is tried again after some steps, by both.
    end = at + 2 * STOCK_STEPS
    assert decisions == [agreed] * at + [failed] * (end - at) + [agreed] * (len(decisions) - end)
    assert 0 < at and end < len(decisions)


def test_each_rank_says_once_why_it_fell_back(run):
    lines = [line for line in run.log.splitlines() if "fall back to stock attention" in line]
    assert len(lines) == 2
    assert any(" TP0] " in line and "(other_rank)" in line for line in lines)
    assert any(" TP1] " in line and "(planner_error)" in line for line in lines)


def test_without_agreement_the_ranks_would_run_different_kernels(run):
    """The comparison above notices it. On a CPU nothing hangs: both kernels reduce alike."""
    first, second = ranks_steps(run, ONE_FAILS_UNHEARD)
    assert sequence(first, "requests") == sequence(second, "requests")
    assert sequence(first, "variant", "requests") != sequence(second, "variant", "requests")
    assert set(sequence(first, "variant")) == {("prefix",)}
    assert sequence(second, "reason").count(("planner_error",)) == 2 * STOCK_STEPS
