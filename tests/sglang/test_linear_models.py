"""Models with linear attention in some layers: those of full attention run plans."""

import pytest

from sgl_prefix_attn.engine.start_checks import TREE_CORE
from tests.sglang.conftest import Engines
from tests.sglang.engine import STOCK, Config, plain
from tests.support.tiny_models import write_tiny

pytestmark = [pytest.mark.engine, pytest.mark.long]

SCENARIOS = plain("staggered", "late_prompt", "two_turns", "long_siblings")
FAULTS = ("shared_node_dropped", "not_appended")
ENV = {"PROBE_TORCH_LINEAR": "1", "PREFIX_ATTN_CHECK": "1", "PREFIX_ATTN_CHECK_EVERY": "4"}
# SGLang's own choice of a tree and of when it keeps states, at ends of chunks; then the other ones.
QWEN3_NEXT = Config(
    "qwen3_next", SCENARIOS + tuple(("long_siblings", fault) for fault in FAULTS), env=ENV
)
LFM2 = Config(
    "lfm2",
    SCENARIOS,
    {
        "mamba_radix_cache_strategy": "no_buffer",
        "disable_overlap_schedule": True,
        "chunked_prefill_size": 64,
    },
    {TREE_CORE: "python", "SGLANG_TEST_RETRACT": "1", **ENV},
)
EXTENDS = Config(
    "extends",
    plain("late_prompt", "long_siblings"),
    {"prefill_attention_backend": "prefix", "chunked_prefill_size": 128},
    {"PREFIX_ATTN_PREFILL": "1", **ENV},
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Engines by the name of the model, which a configuration has, too."""
    return {
        config.name: Engines(
            write_tiny(tmp_path_factory.mktemp(config.name), config.name),
            tmp_path_factory.mktemp(f"{config.name}_engines"),
        )
        for config in (QWEN3_NEXT, LFM2)
    }


@pytest.mark.parametrize("config", [QWEN3_NEXT, LFM2], ids=lambda config: config.name)
def test_full_layers_run_plans(engines, config):
    prefix, stock = (engines[config.name].run(config, name) for name in ("prefix", STOCK))
    for key in SCENARIOS:
        assert prefix.outputs[key] == stock.outputs[key], f"{key} differs"
        assert all(prefix.outputs[key])
    steps = [step for key in SCENARIOS for step in prefix.steps[key]]
    assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "default")}
    assert any(step["cross_check"] for step in steps) and not steps[-1]["mismatches"]
    siblings = prefix.steps["long_siblings", ""]
    shared = [step for step in siblings if step["nodes"] and len(step["requests"]) == 4]
    assert any(step["read"] < 0.6 * step["query_centric"] for step in shared)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_show(engines, fault):
    run = engines["qwen3_next"].run(QWEN3_NEXT)
    assert run.outputs["long_siblings", fault] != run.outputs["long_siblings", ""]
    mismatches = [step["mismatches"] for step in run.steps["long_siblings", fault]]
    assert mismatches[-1] > mismatches[0]


def test_extend_batches_run_plans(engines):
    qwen3_next = engines["qwen3_next"]
    prefix, stock = qwen3_next.run(EXTENDS), qwen3_next.run(QWEN3_NEXT, STOCK)
    for key in EXTENDS.scenarios:
        assert prefix.outputs[key] == stock.outputs[key], f"{key} differs"
    steps = [step for key in EXTENDS.scenarios for step in prefix.steps[key]]
    assert any(step["variant"] == "prefix" for step in steps if "extend" in step)
    assert not steps[-1]["mismatches"]
