"""When a plan stops being valid, on the real engine (the conditions of plan_lifetime.py)."""

import pytest

from tests.sglang.test_outputs import BASE, NO_OVERLAP, NO_RADIX

pytestmark = pytest.mark.engine


def causes(run, scenario):
    """(cause, same requests as the step before) of every plan in a scenario."""
    steps = run.steps[scenario, ""]
    return [
        (cause, i > 0 and step["requests"] == steps[i - 1]["requests"])
        for i, step in enumerate(steps)
        for cause in step["causes"]
    ]


def test_duplicates_are_mapped_to_other_slots_between_two_decode_steps(engines):
    prefix = engines.run(BASE)
    # Same four requests in the same order, all lengths as planned: only the slots moved.
    steps = prefix.steps["duplicates", ""]
    at = next(i for i, step in enumerate(steps) if "mapping" in step["causes"])
    assert steps[at]["requests"] == steps[at - 1]["requests"]
    assert steps[at]["seq_lens"] == [length + 1 for length in steps[at - 1]["seq_lens"]]


def test_mixed_chunks_move_every_length(engines):
    prefix = engines.run(NO_OVERLAP)
    steps = prefix.steps["late_single_token", ""]
    at = next(i for i, step in enumerate(steps) if "lengths" in step["causes"])
    assert steps[at]["requests"] == steps[at - 1]["requests"]
    # Several mixed steps came between, each moving every request by one token.
    moved = {b - a for a, b in zip(steps[at - 1]["seq_lens"], steps[at]["seq_lens"], strict=True)}
    assert len(moved) == 1 and moved.pop() > 2


def test_joins_and_leaves_replan(engines):
    prefix = engines.run(BASE)
    found = [cause for cause, _ in causes(prefix, "staggered")]
    assert found.count("composition") >= 4


def test_a_full_headroom_replans(engines):
    prefix = engines.run(NO_OVERLAP)
    assert ("headroom", True) in causes(prefix, "siblings")


def test_steady_steps_do_not_plan(engines):
    prefix = engines.run(BASE)
    steps = prefix.steps["siblings", ""]
    assert sum(not step["causes"] for step in steps) > len(steps) / 2


def test_steady_steps_read_no_request(engines):
    """SGLang keeps its list of requests as long as none comes or goes."""
    prefix = engines.run(BASE)
    steps = prefix.steps["siblings", ""]
    read = [step["requests_read"] for step in steps]
    assert 0 < sum(read) < len(steps) / 3


def test_retraction_without_a_tree_replans(engines):
    prefix = engines.run(NO_RADIX)
    assert "composition" in [cause for cause, _ in causes(prefix, "late_prompt")]


def test_only_the_kv_of_a_request_compares_by_value():
    """PlanLifetime compares lists of requests and of nodes with ==."""
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.mem_cache.radix_cache import TreeNode

    assert Req.__eq__ is TreeNode.__eq__ is object.__eq__
    allocation = {"kv_allocated_len": 7, "swa_evicted_seqlen": 0}
    assert ReqKvInfo(**allocation) == ReqKvInfo(**allocation)
