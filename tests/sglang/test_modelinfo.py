"""What is read from SGLang's server arguments and layers."""

from types import SimpleNamespace

import pytest
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.server_args import ServerArgs

from sgl_prefix_attn.engine.model_facts import model_facts, unsupported_server
from tests.sglang.fake_server import HKV, HQ, PLAIN_SERVER, D, Server


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({}, None),
        ({"dcp_size": 2}, "parallel:context"),
        ({"enable_dp_attention": True}, "parallel:dp_attention"),
        ({"pp_size": 2}, "parallel:pipeline"),
        ({"enable_two_batch_overlap": True}, "parallel:two_batch_overlap"),
        ({"enable_pdmux": True}, "parallel:pdmux"),
        ({"speculative_algorithm": "EAGLE"}, "speculative:EAGLE"),
        ({"enable_torch_compile": True}, "torch_compile"),
    ],
)
def test_options_that_rule_prefix_kernels_out(option, reason):
    assert unsupported_server(SimpleNamespace(**PLAIN_SERVER | option)) == reason


def test_the_options_are_those_of_sglang():
    fields = ServerArgs.__dataclass_fields__
    assert {name: fields[name].default for name in PLAIN_SERVER} == PLAIN_SERVER


def test_scales_of_fp8_weights_count_only_where_they_scale(monkeypatch):
    runner = Server(monkeypatch).runner
    weights = Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128]
    )
    layer = RadixAttention(HQ, D, 1.0, HKV, 0, quant_config=weights, prefix="model.layers.0.attn")
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.k_scale is not None
    runner.model = SimpleNamespace(modules=lambda: [layer])
    assert not model_facts(runner).kv_scales
    layer.v_scale_float = 0.5
    assert model_facts(runner).kv_scales
