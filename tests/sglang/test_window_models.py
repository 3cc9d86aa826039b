"""Models with windows in some layers: the others run plans, in the same step."""

from dataclasses import replace

import pytest

from sgl_prefix_attn.engine.start_checks import TREE_CORE
from tests.sglang.conftest import Engines
from tests.sglang.engine import STOCK, Config, plain
from tests.support.tiny_models import write_tiny, write_tiny_olmo3
from tests.support.torch_windows import NAME

pytestmark = pytest.mark.engine

CHECK = {"PREFIX_ATTN_CHECK": "1", "PREFIX_ATTN_CHECK_EVERY": "4"}
POOLS = {"PROBE_TORCH_WINDOWS": "torch_native", **CHECK}  # windows have a pool of their own
# Beside plans runs what SGLang is told to, the only backend that knows this model's sinks.
TOLD = {"attention_backend": NAME, "decode_attention_backend": "prefix"}
DEFAULT = {**CHECK, "PROBE_TORCH_WINDOWS": NAME, "PREFIX_ATTN_FALLBACK": "default"}
SINKS = tuple(("siblings", fault) for fault in ("without_sinks", "shared_node_dropped"))
WRONG_FALLBACK = ("siblings", "windows_narrowed")
OLMO3 = Config("olmo3", plain("staggered", "siblings"), env=CHECK)
MELLUM = Config(
    "mellum",
    plain("staggered", "late_prompt", "two_turns", "evicting", "siblings"),
    {"max_total_tokens": 640, "chunked_prefill_size": 64},
    {TREE_CORE: "python", "SGLANG_TEST_RETRACT": "1", **POOLS},
)
GPT_OSS = Config(
    "gpt_oss",
    plain("staggered", "late_prompt", "siblings") + SINKS + (WRONG_FALLBACK,),
    TOLD,
    DEFAULT,
)
CONFIGS = (OLMO3, MELLUM, GPT_OSS)
PLANS, WINDOWS = {"olmo3": "1"}, {"olmo3": "0"}  # by model, layers of either kind


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Engines by the name of the model, which a configuration has, too."""

    def write(model):
        folder = tmp_path_factory.mktemp(model)
        if model == "olmo3":
            return write_tiny_olmo3(folder, ["sliding_attention", "full_attention"])
        return write_tiny(folder, model)

    return {
        config.name: Engines(write(config.name), tmp_path_factory.mktemp(f"{config.name}_engines"))
        for config in CONFIGS
    }


@pytest.mark.parametrize(
    "config",
    [OLMO3, *(pytest.param(config, marks=pytest.mark.long) for config in (MELLUM, GPT_OSS))],
    ids=lambda config: config.name,
)
def test_full_layers_run_plans(engines, config):
    both = engines[config.name]
    tested = both.run(config)
    if config is GPT_OSS:
        stock = both.run(replace(config, engine={}), NAME)
    else:
        stock = both.run(config, STOCK)
    sound = [key for key in config.scenarios if not key[1]]
    for key in sound:
        assert tested.outputs[key] == stock.outputs[key], f"{key} differs"
        assert all(tested.outputs[key])
    steps = [step for key in sound for step in tested.steps[key]]
    assert {step["variant"] for step in steps} == {"prefix"}
    assert any(step["cross_check"] for step in steps)
    assert not any(step["mismatches"] for step in steps)
    planned, windows = PLANS.get(config.name, "1, 3"), WINDOWS.get(config.name, "0, 2")
    assert f"plans serve layers {planned} (full attention, 8/2 heads of 32)" in tested.log
    said = f"layers {windows} (sliding window of 31, 8/2 heads of 32): layers:sliding_window"
    assert f"stock attention serves {said}" in tested.log


@pytest.mark.long
@pytest.mark.parametrize("key", SINKS, ids=lambda key: key[1])
def test_planted_faults_show(engines, key):
    run = engines["gpt_oss"].run(GPT_OSS)
    assert run.outputs[key] != run.outputs["siblings", ""]
    mismatches = [step["mismatches"] for step in run.steps[key]]
    assert mismatches[-1] > mismatches[0]


@pytest.mark.long
def test_windows_of_prefix_steps_run_the_fallback(engines):
    """Its faults are theirs, and no mismatch: check mode compares layers that run plans."""
    run = engines["gpt_oss"].run(GPT_OSS)
    assert f"stock decode by {NAME} (asked)" in run.log
    assert run.outputs[WRONG_FALLBACK] != run.outputs["siblings", ""]
    steps = run.steps[WRONG_FALLBACK]
    assert {step["variant"] for step in steps} == {"prefix"}
    assert steps[-1]["mismatches"] == steps[0]["mismatches"]
