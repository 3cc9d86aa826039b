"""HiCache in engines on a CPU: what was evicted is loaded back and decoded with prefix kernels."""

import pytest

from sgl_prefix_attn.engine.start_checks import TREE_CORE
from tests.sglang.engine import STOCK, Config, plain
from tests.sglang.test_outputs import CHECKED, EVERYTHING, REFERENCE

pytestmark = [pytest.mark.engine, pytest.mark.long]

HICACHE = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
}
# So small a pool that a prompt is evicted. Until 0.5.18 both are HiRadixCache, whatever the core.
SMALL = {"max_total_tokens": 640, **HICACHE}
WRITE_THROUGH = Config(
    "hicache",
    EVERYTHING + plain("loaded_back"),
    {"chunked_prefill_size": 64, "enable_mixed_chunk": True, **SMALL},
    {"PROBE_HOST_COPIES": "1", **CHECKED},
)
WRITE_BACK = Config(
    "hicache_write_back",
    EVERYTHING + plain("loaded_back"),
    {"page_size": 16, "hicache_write_policy": "write_back", **SMALL},
    {"PROBE_HOST_COPIES": "1", TREE_CORE: "python", **CHECKED},
)
DECODE_SERVER = Config(
    "hicache_decode_server",
    plain("handed_over"),
    {
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "fake",
        **{key: HICACHE[key] for key in ("hicache_io_backend", "hicache_mem_layout")},
    },
    {"PROBE_HOST_COPIES": "1", "SGLANG_TEST_RETRACT": "1", **CHECKED},
)
ENGINES = pytest.mark.parametrize("config", [WRITE_THROUGH, WRITE_BACK], ids=lambda c: c.name)


@ENGINES
def test_outputs_equal_stock(engines, config):
    stock, prefix = engines.run(REFERENCE, STOCK), engines.run(config)
    for key in config.scenarios:
        assert prefix.outputs[key] == stock.outputs[key], f"{key} differs"
        steps = prefix.steps[key]
        assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "default")}, key
        assert steps[-1]["mismatches"] == 0 and any(step["cross_check"] for step in steps)


@ENGINES
def test_kv_is_loaded_back_while_a_request_decodes(engines, config):
    steps = engines.run(config).steps["loaded_back", ""]
    pairs = zip(steps, steps[1:], strict=False)
    loads = [(a, b) for a, b in pairs if b["loaded"] > a["loaded"]]
    assert any(set(a["requests"]) & set(b["requests"]) for a, b in loads)
    assert any(step["nodes"] for step in steps if step["loaded"] == steps[-1]["loaded"])


@ENGINES
def test_remaps_are_seen(engines, config):
    """The hooks count on this tree, too: without, every step would read all requests."""
    steps = engines.run(config).steps
    assert any("mapping" in step["causes"] for step in steps["duplicates", ""])
    assert not all(step["requests_read"] for step in steps["siblings", ""])


def test_a_decode_server_restores_the_kv_of_retracted_requests(engines):
    """From a host pool that SGLang attaches unasked, to other slots."""
    run = engines.run(DECODE_SERVER)
    if "hicache_attached=True" not in run.log:
        pytest.skip("this SGLang gives a decode server no host pool")
    steps = run.steps["handed_over", ""]
    assert {(step["variant"], step["reason"]) for step in steps} == {("prefix", "default")}
    assert steps[-1]["loaded"] > 0, "no request was retracted"
    assert steps[-1]["mismatches"] == 0 and any(step["cross_check"] for step in steps)
