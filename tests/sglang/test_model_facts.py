"""What is read from SGLang's server arguments and layers."""

import dataclasses
from importlib.util import find_spec
from types import SimpleNamespace

import msgspec
import pytest
import torch
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.server_args import ServerArgs

from sgl_prefix_attn.engine import sglang_config
from sgl_prefix_attn.engine.model_facts import (
    keeps_states,
    least_saving_us,
    planned_layers,
    sinks_dtype,
    unsupported_extend,
    unsupported_model,
    unsupported_server,
    verifies_chains,
)
from sgl_prefix_attn.step.policy import PLAN_US
from tests.sglang.fake_server import HKV, HQ, PLAIN_SERVER, D, Server


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({}, None),
        ({"dcp_enabled": True}, "parallel:context"),
        ({"enable_prefill_cp": True}, "parallel:context"),
        ({"attn_cp_size": 2}, "parallel:context"),
        ({"enable_dp_attention": True}, "parallel:dp_attention"),
        ({"attn_dp_size": 2}, "parallel:dp_attention"),
        ({"enable_kv_cache_sharding": True}, "parallel:kv_cache_sharding"),
        ({"pp_size": 2}, "parallel:pipeline"),
        ({"enable_two_batch_overlap": True}, "parallel:two_batch_overlap"),
        ({"enable_pdmux": True}, "parallel:pdmux"),
        ({"enable_torch_compile": True}, "torch_compile"),
    ],
)
def test_options_that_rule_prefix_kernels_out(option, reason, monkeypatch):
    vars(Server(monkeypatch).parallel).update(option)
    assert unsupported_server(SimpleNamespace(**PLAIN_SERVER | option)) == reason


def test_linear_layers_are_told_by_their_pool():
    pool = type("HybridLinearKVPool", (), {})()
    assert keeps_states(SimpleNamespace(token_to_kv_pool=pool)) == "layers:linear_attention"
    assert keeps_states(SimpleNamespace(token_to_kv_pool=object())) is None


def test_speculation_is_a_reason_where_there_is_no_other(monkeypatch):
    """Its target model may still verify over plans."""
    runner = Server(monkeypatch).runner
    runner.server_args.speculative_algorithm = "EAGLE"
    assert unsupported_model(runner) == "speculative:EAGLE"
    runner.kv_cache_dtype = torch.float16
    assert unsupported_model(runner) == "kv_dtype:float16"


@pytest.mark.parametrize(
    ("algorithm", "topk", "chains"),
    [("EAGLE", 1, True), ("STANDALONE", 1, True), ("EAGLE3", 4, False), ("NGRAM", 1, False)],
)
def test_whose_drafts_are_chains(monkeypatch, algorithm, topk, chains):
    server = SimpleNamespace(speculative_algorithm=algorithm, speculative_eagle_topk=topk)
    monkeypatch.setattr(sglang_config, "options", lambda server_args: server_args)
    assert verifies_chains(server) == chains


def test_the_options_are_those_of_sglang():
    """Of ServerArgs, a dataclass until 0.5.19 and a msgspec.Struct later."""
    fields = (dataclasses if dataclasses.is_dataclass(ServerArgs) else msgspec.structs).fields
    defaults = {field.name: field.default for field in fields(ServerArgs)}
    assert {name: defaults[name] for name in PLAIN_SERVER} == PLAIN_SERVER


def test_scales_of_fp8_weights_count_only_where_they_scale(monkeypatch):
    runner = Server(monkeypatch).runner
    weights = Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128]
    )
    layer = RadixAttention(HQ, D, 1.0, HKV, 0, quant_config=weights, prefix="model.layers.0.attn")
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.k_scale is not None
    runner.model = SimpleNamespace(modules=lambda: [layer], named_parameters=list)
    assert unsupported_model(runner) is None
    layer.v_scale_float = 0.5
    assert unsupported_model(runner) == "kv_scales"
    runner.kv_cache_dtype = torch.float8_e4m3fn
    assert unsupported_model(runner) is None


LAYER_REASONS = {
    "layers:head_dim": {"v_head_dim": 2 * D},
    "layers:sliding_window": {"sliding_window_size": 128},
    "layers:cross_attention": {"is_cross_attention": True},
    "layers:logit_transform": {"xai_temperature_len": 1},
}
RUNNER_REASONS = {
    "kv_dtype:float8_e5m2": {"kv_cache_dtype": torch.float8_e5m2},
    "kv_pool:MHATokenToKVPool/hnd": {
        "token_to_kv_pool": type("MHATokenToKVPool", (), {"kv_cache_layout": "hnd"})()
    },
    "kv_pool:UnifiedSWAKVPool": {"token_to_kv_pool": type("UnifiedSWAKVPool", (), {})()},
}


@pytest.mark.parametrize("reason", [None, *LAYER_REASONS, *RUNNER_REASONS])
def test_every_unsupported_property_has_its_reason(monkeypatch, reason):
    runner = Server(monkeypatch).runner
    layers = [RadixAttention(HQ, D, 1.0, HKV, i) for i in range(2)]
    runner.model = SimpleNamespace(modules=lambda: layers, named_parameters=list)
    for name, value in LAYER_REASONS.get(reason, {}).items():
        for layer in layers:
            setattr(layer, name, value)
    for name, value in RUNNER_REASONS.get(reason, {}).items():
        setattr(runner, name, value)
    assert unsupported_model(runner) == reason


def test_models_without_layers_and_with_unlike_ones(monkeypatch):
    """One kind of layers that no plan serves leaves the others theirs, but for drafts."""
    runner = Server(monkeypatch).runner
    layers = []
    runner.model = SimpleNamespace(modules=lambda: layers, named_parameters=list)
    assert unsupported_model(runner) == "layers:none"
    layers += [RadixAttention(HQ, D, 1.0, HKV, 0), RadixAttention(2 * HQ, D, 1.0, HKV, 1)]
    for reason in ("layers:different_heads", "layers:sliding_window"):
        assert unsupported_model(runner) is None
        assert unsupported_extend(runner) == reason
        runner.server_args.speculative_algorithm = "EAGLE"
        assert unsupported_model(runner) == reason
        runner.server_args.speculative_algorithm = None
        layers[1].sliding_window_size = 128


def composed(name="HybridLinearKVPool", full="MHATokenToKVPool"):
    """SGLang's pool of a model with several kinds of layers."""
    return type(name, (), {"full_kv_pool": type(full, (), {})()})()


@pytest.mark.parametrize("name", ["HybridLinearKVPool", "SWAKVPool"])
def test_the_pool_of_full_attention_within_another_counts(monkeypatch, name):
    runner = Server(monkeypatch).runner
    runner.token_to_kv_pool = composed(name)
    assert unsupported_model(runner) is None and unsupported_extend(runner) is None
    runner.server_args.speculative_algorithm = "EAGLE"
    assert unsupported_model(runner) == f"kv_pool:{name}"
    runner.server_args.speculative_algorithm = None
    for pool, reason in (
        (composed(name, "MHATokenToKVPoolMXFP8"), "kv_pool:MHATokenToKVPoolMXFP8"),
        (composed("QSATokenToKVPool"), "kv_pool:QSATokenToKVPool"),
        (type("MiniMaxSparseKVPool", (), {})(), "kv_pool:MiniMaxSparseKVPool"),
    ):
        runner.token_to_kv_pool = pool
        assert unsupported_model(runner) == reason


# Of a pool for windows; from 0.5.22 on it has a tree that keeps nothing.
OWN_CHUNKS = "tree:SWAChunkCache" if find_spec("sglang.srt.mem_cache.chunk_cache") else None


@pytest.mark.parametrize(
    ("option", "reasons"),
    [
        ("enable_hierarchical_cache", ["tree:hicache_components"] * 2),
        ("disable_radix_cache", [None, OWN_CHUNKS]),
    ],
)
def test_a_tree_that_will_not_be_read_leaves_such_a_model_alone(monkeypatch, option, reasons):
    runner = Server(monkeypatch).runner
    setattr(runner.server_args, option, True)
    assert unsupported_model(runner) is None, "one pool"
    for name, reason in zip(("HybridLinearKVPool", "SWAKVPool"), reasons, strict=True):
        runner.token_to_kv_pool = composed(name)
        assert unsupported_model(runner) == reason


def test_sinks_are_found_where_sglang_does_not_say_so(monkeypatch):
    """As of a gpt-oss within a model of images."""
    runner = Server(monkeypatch, sinks=torch.zeros(HQ)).runner
    runner.model_config.has_attention_sinks = False
    assert sinks_dtype(runner) == torch.bfloat16
    assert sinks_dtype(Server(monkeypatch).runner) is None


def test_sinks_were_not_tried_with_drafts(monkeypatch):
    runner = Server(monkeypatch, sinks=torch.zeros(HQ)).runner
    assert sinks_dtype(runner) == torch.bfloat16 and unsupported_model(runner) is None
    runner.server_args.speculative_algorithm = "EAGLE"
    assert unsupported_model(runner) == "layers:sinks"


def test_bytes_and_savings_are_those_of_planned_layers(monkeypatch):
    runner = Server(monkeypatch).runner
    layers = [RadixAttention(HQ, D, 1.0, HKV, i) for i in range(6)]
    runner.model = SimpleNamespace(modules=lambda: layers, named_parameters=list)
    for layer in layers[:4]:
        layer.sliding_window_size = 128
    assert planned_layers(runner) == layers[4:]
    assert least_saving_us(runner, passes=2) == PLAN_US / 4
