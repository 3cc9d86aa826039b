"""Greedy outputs of `--attention-backend prefix` equal torch_native's, on real CPU engines."""

import pytest

from tests.sglang.engine import Config, plain

pytestmark = pytest.mark.engine

EVERYTHING = plain(
    "staggered",
    "duplicates",
    "late_prompt",
    "late_single_token",
    "two_turns",
    "unshared",
    "extra_key",
    "siblings",
)
CHECKED = {"SGL_PREFIX_ATTN_CHECK": "1", "SGL_PREFIX_ATTN_CHECK_EVERY": "2"}

BASE = Config("base", EVERYTHING, env=CHECKED)
CHUNKED = Config(
    "mixed_chunks",
    EVERYTHING,
    {"chunked_prefill_size": 64, "enable_mixed_chunk": True},
    CHECKED,
)
PAGED = Config(
    "page_16_chunked", EVERYTHING, {"page_size": 16, "chunked_prefill_size": 64}, CHECKED
)
RETRACTED = Config("retraction", EVERYTHING, env={"SGLANG_TEST_RETRACT": "1", **CHECKED})
NO_RADIX = Config(
    "no_radix", EVERYTHING, {"disable_radix_cache": True}, {"SGLANG_TEST_RETRACT": "1", **CHECKED}
)
NO_OVERLAP = Config(
    "no_overlap",
    EVERYTHING,
    {"disable_overlap_schedule": True, "chunked_prefill_size": 64, "enable_mixed_chunk": True},
    {"SGL_PREFIX_ATTN_HEADROOM": "5", "SGL_PREFIX_ATTN_STRATEGY": "naive", **CHECKED},
)
CONFIGS = (BASE, CHUNKED, PAGED, RETRACTED, NO_RADIX, NO_OVERLAP)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_outputs_equal_stock(engines, config):
    stock, prefix = engines.both(config)
    for key, outputs in stock.outputs.items():
        assert prefix.outputs[key] == outputs, f"{key} differs"
        assert all(outputs), "every request produced tokens"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_decode_step_ran_prefix_kernels_and_passed_the_checks(engines, config):
    _, prefix = engines.both(config)
    for key, steps in prefix.steps.items():
        assert steps, key
        assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "default")}, key
    last = [step for steps in prefix.steps.values() for step in steps][-1]
    assert last["mismatches"] == 0
    assert any(step["cross_check"] for steps in prefix.steps.values() for step in steps)


def test_scenarios_reach_what_they_are_meant_to(engines):
    """Guards the comparison itself: sharing, splits and joins did happen."""
    _, prefix = engines.both(BASE)
    plans = [step for step in prefix.steps["staggered", ""] if step["nodes"] is not None]
    assert max(step["nodes"] for step in plans) >= 3
    assert max(len(step["requests"]) for step in plans) >= 3
    shared = [step for step in prefix.steps["siblings", ""] if step["nodes"]]
    assert any(step["read"] < step["query_centric"] for step in shared)
    unshared = [step for step in prefix.steps["unshared", ""] if step["nodes"] is not None]
    assert all(step["read"] == step["query_centric"] for step in unshared)


def test_extra_key_separates_trees(engines):
    _, prefix = engines.both(BASE)
    plans = [s for s in prefix.steps["extra_key", ""] if s["nodes"] and len(s["requests"]) == 4]
    # Only the two requests under key "a" share.
    assert plans and all(step["nodes"] == 1 for step in plans)


def test_radix_cache_off_is_a_forest_of_single_tails(engines):
    _, prefix = engines.both(NO_RADIX)
    plans = [s for steps in prefix.steps.values() for s in steps if s["nodes"] is not None]
    assert plans and all(step["nodes"] == 0 for step in plans)
