"""Policy: a pure function of facts; the reason always says what stood in the way."""

import dataclasses

import pytest

from sgl_prefix_attn.policy import BatchFacts, ModelFacts, decide, unsupported_model
from sgl_prefix_attn.records import Decision

LLAMA = ModelFacts(
    head_configs=1,
    equal_head_dims=True,
    sliding_window=False,
    cross_attention=False,
    logit_transform=False,
    kv_scales=False,
    kv_dtype="bfloat16",
    model_dtype="bfloat16",
    device="cuda",
    kv_pool="MHATokenToKVPool",
    parallel=None,
)


def test_a_plain_model_is_supported():
    assert unsupported_model(LLAMA) is None
    on_cpu = {"model_dtype": "float32", "kv_dtype": "float32", "device": "cpu"}
    assert unsupported_model(dataclasses.replace(LLAMA, **on_cpu)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_configs": 2}, "layers:different_heads"),
        ({"head_configs": 0}, "layers:different_heads"),
        ({"equal_head_dims": False}, "layers:head_dim"),
        ({"sliding_window": True}, "layers:sliding_window"),
        ({"cross_attention": True}, "layers:cross_attention"),
        ({"logit_transform": True}, "layers:logit_transform"),
        ({"parallel": "context"}, "parallel:context"),
        ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype:float8_e4m3fn"),
        ({"kv_scales": True}, "kv_dtype:bfloat16"),
        ({"model_dtype": "float32", "kv_dtype": "float32"}, "dtype:float32"),
        ({"kv_pool": "MHATokenToKVPool/hnd"}, "kv_pool:MHATokenToKVPool/hnd"),
        ({"kv_pool": "SWAKVPool"}, "kv_pool:SWAKVPool"),
    ],
)
def test_every_unsupported_property_has_its_reason(change, reason):
    assert unsupported_model(dataclasses.replace(LLAMA, **change)) == reason


@pytest.mark.parametrize(
    ("facts", "decision"),
    [
        (BatchFacts(), Decision("prefix", "default")),
        (BatchFacts(policy="prefix"), Decision("prefix", "forced")),
        (BatchFacts(policy="stock"), Decision("stock", "forced")),
        (BatchFacts(tree="tree:HiRadixCache"), Decision("stock", "tree:HiRadixCache")),
        (BatchFacts(model="kv_dtype:x", tree="tree:y"), Decision("stock", "kv_dtype:x")),
        (BatchFacts(fault="planner_error"), Decision("stock", "planner_error")),
        (BatchFacts(graph="graph_batch_size"), Decision("stock", "graph_batch_size")),
        (BatchFacts(graph="graph_x", tree="tree:y"), Decision("stock", "tree:y")),
        (BatchFacts(graph="graph_x", policy="stock"), Decision("stock", "forced")),
        # Forcing prefix does not force what cannot work.
        (BatchFacts(policy="prefix", graph="graph_x"), Decision("stock", "graph_x")),
        (BatchFacts(policy="prefix", tree="tree:y"), Decision("stock", "tree:y")),
        (BatchFacts(policy="prefix", fault="planner_error"), Decision("stock", "planner_error")),
    ],
)
def test_decisions(facts, decision):
    assert decide(facts) == decision
    assert decide(facts) == decide(dataclasses.replace(facts)), "equal facts, equal decision"
