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
CHECKED = {"SGL_PREFIX_ATTN_CHECK": "1", "SGL_PREFIX_ATTN_CHECK_EVERY": "2"}

# Greedy outputs in float32 are those of the model, whatever is scheduled how: one stock engine
# speaks for every configuration.
REFERENCE = Config("reference", EVERYTHING + plain("evicting", "loaded_back"))
BASE = Config("base", EVERYTHING + FOUND, env={"DRIVER_SPAWNS": "1", **CHECKED})
CHUNKED = Config(
    "mixed_chunks",
    EVERYTHING,
    {"chunked_prefill_size": 64, "enable_mixed_chunk": True, "schedule_policy": "lof"},
    CHECKED,
)
PAGED = Config(
    "page_16_chunked",
    EVERYTHING,
    {"page_size": 16, "chunked_prefill_size": 64, "schedule_policy": "dfs-weight"},
    CHECKED,
)
RETRACTED = Config(
    "retraction",
    EVERYTHING + plain("evicting"),
    {"max_total_tokens": 640},
    {"SGLANG_TEST_RETRACT": "1", **CHECKED},
)
NO_RADIX = Config(
    "no_radix", EVERYTHING, {"disable_radix_cache": True}, {"SGLANG_TEST_RETRACT": "1", **CHECKED}
)
NO_OVERLAP = Config(
    "no_overlap",
    EVERYTHING,
    {
        "disable_overlap_schedule": True,
        "chunked_prefill_size": 64,
        "enable_mixed_chunk": True,
        "enable_streaming_session": True,
    },
    {"SGL_PREFIX_ATTN_HEADROOM": "5", "SGL_PREFIX_ATTN_STRATEGY": "naive", **CHECKED},
)
WRONG_TILES = ("shared_node_dropped", "tails_swapped", "not_appended")
ROW_TILES = Config(
    "row_tiles",
    EVERYTHING + tuple(("siblings", fault) for fault in WRONG_TILES),
    {"chunked_prefill_size": 64, "enable_mixed_chunk": True},
    {
        "PROBE_ROW_TILES": "1",
        "SGLANG_TEST_RETRACT": "1",
        "SGL_PREFIX_ATTN_HEADROOM": "5",
        **CHECKED,
    },
)
CONFIGS = (BASE, CHUNKED, PAGED, RETRACTED, NO_RADIX, NO_OVERLAP, ROW_TILES)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_outputs_equal_stock(engines, config):
    stock, prefix = engines.run(REFERENCE, STOCK), engines.run(config)
    for key in config.scenarios:
        if key[1]:
            continue  # a planted fault
        assert prefix.outputs[key] == stock.outputs[key], f"{key} differs"
        assert all(prefix.outputs[key]), "every request produced tokens"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_decode_step_ran_prefix_kernels_and_passed_the_checks(engines, config):
    steps = engines.run(config).steps
    for key in EVERYTHING:
        assert steps[key], key
        found = {(step["variant"], step["reason"]) for step in steps[key]}
        assert found == {("prefix", "default")}, key
    all_steps = [step for key in EVERYTHING for step in steps[key]]
    assert all_steps[-1]["mismatches"] == 0
    assert any(step["cross_check"] for step in all_steps)


@pytest.mark.parametrize(("config", "kernels"), [(BASE, "packs"), (ROW_TILES, "row tiles")])
def test_the_log_names_the_kernels(engines, config, kernels):
    assert f"prefix steps run {kernels}" in engines.run(config).log


@pytest.mark.parametrize(("config", "method"), [(BASE, "spawn"), (ROW_TILES, "fork")])
def test_processes_are_copies_unless_they_start_as_on_a_gpu(engines, config, method):
    steps = engines.run(config).steps["siblings", ""]
    assert {step["start_method"] for step in steps} == {method}


@pytest.mark.parametrize("fault", WRONG_TILES)
def test_outputs_of_wrong_row_tiles_differ(engines, fault):
    """Those of packs: test_engine_faults.py."""
    right = engines.run(REFERENCE, STOCK).outputs["siblings", ""]
    assert engines.run(ROW_TILES).outputs["siblings", fault] != right


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


def test_kv_is_evicted_while_others_decode(engines):
    steps = engines.run(RETRACTED).steps["evicting", ""]
    assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "default")}
    evicted = [step["evicted"] for step in steps if len(step["requests"]) >= 2]
    assert evicted[-1] > evicted[0], "the radix cache had room for all"
    assert steps[-1]["mismatches"] == 0


def test_radix_cache_off_is_a_forest_of_single_tails(engines):
    prefix = engines.run(NO_RADIX)
    plans = [s for key in EVERYTHING for s in prefix.steps[key] if s["nodes"] is not None]
    assert plans and all(step["nodes"] == 0 for step in plans)
