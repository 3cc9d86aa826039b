"""Greedy outputs of `--attention-backend prefix` equal torch_native's, on real CPU engines."""

import pytest

from tests.sglang.engine import STOCK, Config, plain

pytestmark = pytest.mark.engine

EVERYTHING = plain(
    "staggered", "duplicates", "late_prompt", "late_single_token", "two_turns", "unshared",
    "extra_key", "siblings",
)  # fmt: skip
# Found by check mode; test_engine_faults.py looks at them.
FOUND = tuple(("siblings", f) for f in ("tree_off_by_one", "not_appended", "shared_node_dropped"))
CHECKED = {"PREFIX_ATTN_CHECK": "1", "PREFIX_ATTN_CHECK_EVERY": "2"}

# Greedy outputs in float32 are those of the model, whatever is scheduled how: one stock engine
# speaks for every configuration.
REFERENCE = Config(
    "reference",
    EVERYTHING + plain("evicting", "loaded_back", "sessions", "samples", "aborted", "churn"),
)
BASE = Config("base", EVERYTHING + plain("sessions") + FOUND, env={"DRIVER_SPAWNS": "1", **CHECKED})
CHUNKED = Config(
    "mixed_chunks",
    EVERYTHING + plain("aborted"),
    {"chunked_prefill_size": 64, "enable_mixed_chunk": True, "schedule_policy": "lof"},
    CHECKED,
)
PAGED = Config(
    "page_16_chunked",
    EVERYTHING + plain("churn"),
    {"page_size": 16, "chunked_prefill_size": 64, "schedule_policy": "dfs-weight"},
    CHECKED,
)
RETRACTED = Config(
    "retraction",
    EVERYTHING + plain("evicting", "samples", "churn"),
    {"max_total_tokens": 640},
    {"SGLANG_TEST_RETRACT": "1", **CHECKED},
)
NO_RADIX = Config(
    "no_radix", EVERYTHING, {"disable_radix_cache": True}, {"SGLANG_TEST_RETRACT": "1", **CHECKED}
)
NO_OVERLAP = Config(
    "no_overlap",
    EVERYTHING + plain("sessions"),
    {
        "disable_overlap_schedule": True,
        "chunked_prefill_size": 64,
        "enable_mixed_chunk": True,
        "enable_streaming_session": True,
    },
    {"PREFIX_ATTN_HEADROOM": "5", "PREFIX_ATTN_STRATEGY": "naive", **CHECKED},
)
WRONG_TILES = ("shared_node_dropped", "tails_swapped", "not_appended")
HOPPER = Config(
    "hopper",
    EVERYTHING
    + plain("samples", "aborted", "churn")
    + tuple(("siblings", fault) for fault in WRONG_TILES),
    {"chunked_prefill_size": 64, "enable_mixed_chunk": True},
    {
        "PROBE_HOPPER": "1",
        "SGLANG_TEST_RETRACT": "1",
        "PREFIX_ATTN_HEADROOM": "5",
        **CHECKED,
    },
)


def some_long(*configs):
    """Base and hopper are engines of every run of the tests, others of all tests alone."""
    short = (BASE, HOPPER)
    return [c if c in short else pytest.param(c, marks=pytest.mark.long) for c in configs]


CONFIGS = some_long(BASE, CHUNKED, PAGED, RETRACTED, NO_RADIX, NO_OVERLAP, HOPPER)


def named(config):
    return config.name


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_outputs_equal_stock(engines, config):
    stock, prefix = engines.run(REFERENCE, STOCK), engines.run(config)
    for key in config.scenarios:
        if key[1]:
            continue  # a planted fault
        assert prefix.outputs[key] == stock.outputs[key], f"{key} differs"
        assert all(prefix.outputs[key]), "every request produced tokens"


@pytest.mark.parametrize("config", CONFIGS, ids=named)
def test_every_decode_step_ran_prefix_kernels_and_passed_the_checks(engines, config):
    steps = engines.run(config).steps
    right = [key for key in config.scenarios if not key[1]]
    for key in right:
        assert steps[key], key
        found = {(step["variant"], step["reason"]) for step in steps[key]}
        assert found == {("prefix", "default")}, key
    all_steps = [step for key in right for step in steps[key]]
    assert all_steps[-1]["mismatches"] == 0
    assert any(step["cross_check"] for step in all_steps)


@pytest.mark.parametrize(("config", "kernels"), [(BASE, "portable"), (HOPPER, "Hopper")])
def test_the_log_names_the_kernels(engines, config, kernels):
    assert f"prefix steps run {kernels} kernels" in engines.run(config).log


@pytest.mark.parametrize(("config", "method"), [(BASE, "spawn"), (HOPPER, "fork")])
def test_processes_are_copies_unless_they_start_as_on_a_gpu(engines, config, method):
    steps = engines.run(config).steps["siblings", ""]
    assert {step["start_method"] for step in steps} == {method}


@pytest.mark.parametrize("fault", WRONG_TILES)
def test_outputs_of_wrong_plans_differ(engines, fault):
    """Those that split nodes off: test_engine_faults.py."""
    right = engines.run(REFERENCE, STOCK).outputs["siblings", ""]
    assert engines.run(HOPPER).outputs["siblings", fault] != right


def test_scenarios_reach_what_they_are_meant_to(engines):
    """Guards the comparison itself: sharing, splits and joins did happen."""
    prefix = engines.run(BASE)
    plans = [step for step in prefix.steps["staggered", ""] if step["nodes"] is not None]
    assert max(step["nodes"] for step in plans) >= 3
    assert max(len(step["requests"]) for step in plans) >= 3
    shared = [step for step in prefix.steps["siblings", ""] if step["nodes"]]
    assert any(step["read"] < step["query_centric"] for step in shared)
    unshared = [step for step in prefix.steps["unshared", ""] if step["nodes"] is not None]
    assert all(step["read"] == step["query_centric"] for step in unshared)


def test_extra_key_separates_trees(engines):
    prefix = engines.run(BASE)
    steps = [step for step in prefix.steps["extra_key", ""] if len(step["requests"]) == 6]
    nodes = {step["nodes"] for step in steps if step["nodes"] is not None}
    # One node would be all six sharing, none would be no sharing at all.
    assert nodes == {3}


@pytest.mark.long
def test_kv_is_evicted_while_others_decode(engines):
    steps = engines.run(RETRACTED).steps["evicting", ""]
    evicted = [step["evicted"] for step in steps if len(step["requests"]) >= 2]
    assert evicted[-1] > evicted[0], "the radix cache had room for all"


@pytest.mark.parametrize("config", some_long(RETRACTED, HOPPER), ids=named)
def test_samples_with_log_probabilities_are_retracted_and_come_back(engines, config):
    steps = [set(step["requests"]) for step in engines.run(config).steps["samples", ""]]
    left = set()
    for before, now in zip(steps, steps[1:], strict=False):
        if left & now:
            return
        left |= before - now
    raise AssertionError("no request that left came back")


@pytest.mark.long
def test_a_prompt_is_aborted_between_its_chunks(engines):
    steps = engines.run(CHUNKED).steps["aborted", ""]
    assert not any("aborted" in step["requests"] for step in steps), "all chunks were prefilled"
    pairs = list(zip(steps, steps[1:], strict=False))
    same = [(a["seq_lens"], b["seq_lens"]) for a, b in pairs if a["requests"] == b["requests"]]
    # Each mixed step in between moved the others by a token.
    assert any(b[0] - a[0] > 2 for a, b in same)


@pytest.mark.parametrize("config", some_long(PAGED, RETRACTED, HOPPER), ids=named)
def test_requests_come_and_go_while_others_decode(engines, config):
    steps = [step["requests"] for step in engines.run(config).steps["churn", ""]]
    assert len({rid for requests in steps for rid in requests}) > 35
    assert sum(set(a) != set(b) for a, b in zip(steps, steps[1:], strict=False)) > 25
    assert max(map(len, steps)) >= 4


@pytest.mark.parametrize("config", some_long(BASE, NO_OVERLAP), ids=named)
def test_turns_of_sessions_decode_together(engines, config):
    steps = engines.run(config).steps["sessions", ""]
    assert any({"one 2", "other 2"} <= set(step["requests"]) for step in steps)


@pytest.mark.long
def test_radix_cache_off_is_a_forest_of_single_tails(engines):
    prefix = engines.run(NO_RADIX)
    plans = [s for key in EVERYTHING for s in prefix.steps[key] if s["nodes"] is not None]
    assert plans and all(step["nodes"] == 0 for step in plans)
