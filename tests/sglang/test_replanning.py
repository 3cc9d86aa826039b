"""When a plan stops being valid, on the real engine (the conditions of plan_lifetime.py)."""

import pytest

from tests.sglang.test_outputs import BASE, NO_OVERLAP, NO_RADIX


def steps_of(engines, config, scenario):
    return engines.run(config).steps[scenario, ""]


def causes(steps):
    return [cause for step in steps for cause in step["causes"]]


def replanned_for_the_same_requests(steps, cause):
    """(step, the one before) of the first plan of that cause for which no request came or went."""
    pairs = zip(steps[1:], steps, strict=False)
    return next(
        (step, before)
        for step, before in pairs
        if cause in step["causes"] and step["requests"] == before["requests"]
    )


@pytest.mark.engine
@pytest.mark.long
def test_duplicates_are_mapped_to_other_slots_between_two_decode_steps(engines):
    steps = steps_of(engines, BASE, "duplicates")
    step, before = replanned_for_the_same_requests(steps, "mapping")
    # All lengths as planned: only the slots moved.
    assert step["seq_lens"] == [length + 1 for length in before["seq_lens"]]


@pytest.mark.engine
@pytest.mark.long
def test_mixed_chunks_move_every_length(engines):
    steps = steps_of(engines, NO_OVERLAP, "late_single_token")
    step, before = replanned_for_the_same_requests(steps, "lengths")
    # Several mixed steps came between, each moving every request by one token.
    moved = {b - a for a, b in zip(before["seq_lens"], step["seq_lens"], strict=True)}
    assert len(moved) == 1 and moved.pop() > 2


@pytest.mark.engine
@pytest.mark.long
def test_joins_leaves_retractions_and_a_full_headroom_replan(engines):
    assert causes(steps_of(engines, BASE, "staggered")).count("composition") >= 4
    assert "composition" in causes(steps_of(engines, NO_RADIX, "late_prompt"))
    replanned_for_the_same_requests(steps_of(engines, NO_OVERLAP, "siblings"), "headroom")


@pytest.mark.engine
@pytest.mark.long
def test_steady_steps_neither_plan_nor_read_a_request(engines):
    """SGLang keeps its list of requests as long as none comes or goes."""
    steps = steps_of(engines, BASE, "siblings")
    assert sum(not step["causes"] for step in steps) > len(steps) / 2
    assert 0 < sum(step["requests_read"] for step in steps) < len(steps) / 3


def test_only_the_kv_of_a_request_compares_by_value():
    """PlanLifetime compares lists of requests and of nodes with ==."""
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.mem_cache.radix_cache import TreeNode

    assert Req.__eq__ is TreeNode.__eq__ is object.__eq__
    allocation = {"kv_allocated_len": 7, "swa_evicted_seqlen": 0}
    allocation = {k: v for k, v in allocation.items() if k in ReqKvInfo.__dataclass_fields__}
    assert ReqKvInfo(**allocation) == ReqKvInfo(**allocation)
