"""Which of SGLang's backends decodes beside plans, and that the policy predicts that one."""

from dataclasses import replace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sgl_prefix_attn.engine import backend as backend_module
from sgl_prefix_attn.engine import fallback
from sgl_prefix_attn.engine.fallback import Fallback, choose
from sgl_prefix_attn.engine.layer_groups import CHUNK, FULL, WINDOW, LayerTraits
from sgl_prefix_attn.settings import Settings
from tests.sglang.fake_server import HKV, HQ, D, Server, Stock

BF16 = torch.bfloat16
PLAIN = LayerTraits(FULL, -1, 32, 8, 128, 128, BF16, BF16)
NARROW_WINDOW = replace(PLAIN, kind=WINDOW, window=127)
SINK = replace(PLAIN, sinks=BF16)
# Kinds of layers, and why FlashInfer cannot serve a model of them.
MODELS = {
    "llama": ([PLAIN], None),
    "gemma2": ([PLAIN, replace(PLAIN, kind=WINDOW, window=4095)], "layers:windows"),
    "e4m3": ([replace(PLAIN, kv_dtype=torch.float8_e4m3fn)], None),
    "float32": ([replace(PLAIN, dtype=torch.float32, kv_dtype=torch.float32)], None),
    "llama4": ([PLAIN, replace(PLAIN, kind=CHUNK)], "layers:chunks"),
    "gpt_oss": ([SINK, replace(NARROW_WINDOW, sinks=BF16)], "layers:sinks"),
    "phi3_mini": ([replace(PLAIN, num_kv_heads=32, head_dim=96, v_head_dim=96)], "layers:head_dim"),
    "gemma2 9b": ([replace(PLAIN, head_dim=256, v_head_dim=256)], None),
    "mimo_v2": ([replace(PLAIN, head_dim=192)], "layers:head_dim"),
    "gemma4": ([replace(PLAIN, num_kv_heads=4), NARROW_WINDOW], "layers:windows"),
    "two heads": ([PLAIN, replace(PLAIN, num_kv_heads=4)], "layers:different_heads"),
    "two windows": (
        [PLAIN, NARROW_WINDOW, replace(NARROW_WINDOW, window=1023)],
        "layers:windows",
    ),
    "grok": ([replace(PLAIN, transforms=True)], "layers:logit_transform"),
    "deepseek": (
        [replace(PLAIN, num_kv_heads=1, head_dim=576, v_head_dim=512, latent=True)],
        "layers:latent",
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu(model):
    layers, against = MODELS[model]
    default = Fallback("fa3", "asked")
    assert choose("default", "fa3", True, layers) == default
    if against is None:
        assert choose("auto", "fa3", True, layers) == Fallback("flashinfer", "usual")
        assert choose("flashinfer", "fa3", True, layers) == Fallback("flashinfer", "asked")
    else:
        assert choose("auto", "fa3", True, layers) == Fallback("fa3", against)
        with pytest.raises(ValueError, match=f"FALLBACK=flashinfer: .*{against}.*to run fa3"):
            choose("flashinfer", "fa3", True, layers)


def test_a_deterministic_server_takes_what_sglang_calls_deterministic_there():
    assert choose("auto", "fa3", True, [PLAIN], True) == Fallback("fa3", "deterministic")
    assert choose("auto", "flashinfer", True, [PLAIN], True).reason == "usual"
    assert choose("flashinfer", "flashinfer", True, [PLAIN], True).reason == "asked"
    with pytest.raises(ValueError, match=r"\(deterministic\)\. Unset it to run fa3"):
        choose("flashinfer", "fa3", True, [PLAIN], True)


def test_on_a_cpu():
    assert choose("auto", "torch_native", False, [PLAIN]) == Fallback("torch_native", "device:cpu")
    with pytest.raises(ValueError, match="cannot serve this model here .device:cpu."):
        choose("flashinfer", "torch_native", False, [PLAIN])


# --- a server ------------------------------------------------------------------------------------


USUAL, TOLD = Fallback("flashinfer", "usual"), Fallback("fa3", "asked")


def window_layer():
    return {"others": [RadixAttention(HQ, D, D**-0.5, HKV, 1, sliding_window_size=16)]}


@pytest.mark.parametrize(
    ("chosen", "options", "made"),
    [
        (USUAL, {}, ["flashinfer"]),
        (TOLD, {}, ["fa3"]),
        (TOLD, window_layer(), ["fa3", "fa3"]),  # of graphs with prefix kernels
        (USUAL, {"prefill": "prefix"}, ["flashinfer", "fa3"]),  # which extends faster
        (TOLD, {"prefill": "prefix"}, ["fa3"]),  # for all batches
    ],
)
def test_one_backend_is_composed_and_its_times_are_predicted(chosen, options, made, monkeypatch):
    server = Server(monkeypatch, **options)
    runner, built = server.runner, backend_module.build
    runner.server_args.attention_backend = "fa3"
    composed, predicted = [], []

    def create(runner, name):
        composed.append(name)
        return Stock([])

    def noted(runner, heads, settings, name):
        predicted.append(name)
        return built(runner, heads, settings, name)

    monkeypatch.setattr(fallback, "of", lambda runner, settings: chosen)
    monkeypatch.setattr(backend_module, "create_stock", create)
    monkeypatch.setattr(backend_module, "build", noted)
    backend = backend_module.PrefixAttnBackend(runner, Settings(headroom=8, prefill=True))
    assert composed == made and predicted == [chosen.name]
    assert backend.fallback == chosen


def test_a_server_is_asked_for_all_its_layers(monkeypatch):
    """On a GPU, with sinks."""
    server = Server(monkeypatch, sinks=torch.zeros(HQ), **window_layer())
    server.runner.server_args.attention_backend = "fa3"
    server.runner.device = "cuda"
    assert fallback.of(server.runner, Settings()) == Fallback("fa3", "layers:sinks")
    with pytest.raises(ValueError, match="layers:sinks"):
        fallback.of(server.runner, Settings(fallback="flashinfer"))
