"""Which layers of a model run plans, and what the others run beside them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sgl_prefix_attn.engine.layer_groups import CHUNK, FULL, WINDOW, LayerTraits, divide
from sgl_prefix_attn.metrics.counters import KvSize
from tests.sglang.fake_graph_runner import GraphRunner, captured
from tests.sglang.fake_server import HKV, HQ, D, Server

# --- the decision --------------------------------------------------------------------------------


def full(hq, hkv, dim, **changes):
    traits = LayerTraits(FULL, -1, hq, hkv, dim, dim, torch.bfloat16, torch.bfloat16)
    return replace(traits, **changes)


def window(size, *heads, **changes):
    return full(*heads, kind=WINDOW, window=size - 1, **changes)


# Layers of released models in their order, how many of them run plans, and why the others do not.
FAMILIES = {
    "llama": ([full(32, 8, 128)] * 32, 32, []),
    "gemma2": ([window(4096, 8, 4, 256), full(8, 4, 256)] * 13, 13, ["layers:sliding_window"]),
    "gemma3": (
        ([window(1024, 8, 4, 256)] * 5 + [full(8, 4, 256)]) * 4, 4, ["layers:sliding_window"],
    ),
    "olmo3": (
        ([window(4096, 32, 32, 128)] * 3 + [full(32, 32, 128)]) * 8, 8, ["layers:sliding_window"],
    ),
    "gemma4": (  # full layers have other heads than those with windows
        ([window(512, 8, 4, 256)] * 5 + [full(8, 1, 512)]) * 5, 5, ["layers:sliding_window"],
    ),
    "step3p5": (
        ([full(64, 8, 128)] + [window(512, 96, 8, 128)] * 3) * 11, 11, ["layers:sliding_window"],
    ),
    "llama4": (
        ([full(40, 8, 128, kind=CHUNK)] * 3 + [full(40, 8, 128)]) * 12,
        12,
        ["layers:sliding_window"],
    ),
    "gpt_oss": (
        [window(128, 64, 8, 64, sinks=torch.bfloat16), full(64, 8, 64, sinks=torch.bfloat16)] * 12,
        12,
        ["layers:sliding_window"],
    ),
    "mimo_v2_flash": (
        [
            full(64, 4, 192, v_head_dim=128),
            window(128, 64, 8, 192, v_head_dim=128, sinks=torch.bfloat16),
        ],
        0,
        ["layers:head_dim", "layers:head_dim"],
    ),
    "qwen3_next": ([full(16, 2, 256)] * 12, 12, []),  # its linear layers are of another class
    "deepseek_v3": ([full(16, 1, 576, v_head_dim=512, latent=True)] * 61, 61, []),
    "deepseek_v3, e4m3 KV": (
        [full(16, 1, 576, v_head_dim=512, latent=True, kv_dtype=torch.float8_e4m3fn)],
        0,
        ["kv_dtype:float8_e4m3fn"],
    ),
    "e4m3 KV": ([full(32, 8, 128, kv_dtype=torch.float8_e4m3fn)] * 2, 2, []),
    "e5m2 KV": ([full(32, 8, 128, kv_dtype=torch.float8_e5m2)], 0, ["kv_dtype:float8_e5m2"]),
    "KV with scales": ([full(32, 8, 128, kv_scales=True)], 0, ["kv_scales"]),
    "grok": ([full(48, 8, 128, transforms=True)], 0, ["layers:logit_transform"]),
    "two kinds of heads": (
        [full(8, 1, 128), full(8, 2, 128), full(8, 2, 128)], 2, ["layers:different_heads"],
    ),
    "none": ([], 0, []),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_which_group_runs_plans(family):
    layers, count, reasons = FAMILIES[family]
    groups = divide(dict(enumerate(layers)))
    assert len(groups.planned.layer_ids if groups.planned else ()) == count
    assert [group.reason for group in groups.left] == reasons
    assert groups.problem == (None if count else (reasons or ["layers:none"])[0])
    everything = [*groups.left, *filter(None, [groups.planned])]
    assert sorted(i for group in everything for i in group.layer_ids) == [*range(len(layers))]
    for group in everything:
        assert all(layers[i] == group.traits for i in group.layer_ids)


def test_a_group_says_which_layers_it_is():
    groups = divide(dict(enumerate(FAMILIES["gemma3"][0][:9])))
    assert str(groups.planned) == "layers 5 (full attention, 8/4 heads of 256)"
    assert str(groups.left[0]) == "layers 0-4, 6-8 (sliding window of 1023, 8/4 heads of 256)"


# --- the steps -----------------------------------------------------------------------------------


@pytest.fixture
def mixed(monkeypatch):
    """A server of a model that has a layer with a window behind the one that plans serve."""
    layer = RadixAttention(HQ, D, 1.0, HKV, 1, sliding_window_size=16)
    size = []
    monkeypatch.setattr(
        "sgl_prefix_attn.engine.counters_of.DecodeLog", lambda *args: size.append(args[1])
    )
    server = Server(monkeypatch, others=[layer])
    server.window = layer
    assert size == [KvSize(num_layers=1, token_bytes=2 * HKV * D * 4)]
    return server


def attend_window(server, batch):
    q, k, v = (torch.zeros(3, heads * D) for heads in (HQ, HKV, HKV))
    return server.backend.forward_decode(q, k, v, server.window, batch, sinks=None)


def test_a_step_runs_both_kinds_of_layers(mixed):
    batch, q, out = mixed.eager_step(1)
    mixed.assert_attention(batch, q, out)
    assert (attend_window(mixed, batch) == 7).all()
    assert mixed.trace == ["prefix", "stock"]
    assert mixed.stock.calls == ["metadata", "decode"] and not mixed.beside.calls
    assert mixed.stock.saved == [True], "the layer's own KV"


def test_a_step_whose_kernels_fail_goes_on(mixed, monkeypatch):
    def broken(layer):
        raise ValueError("kernels that do not compile")

    monkeypatch.setattr(mixed.backend.decode.executor, "run", broken)
    batch, _, out = mixed.eager_step(1)
    assert (out == 7).all() and (attend_window(mixed, batch) == 7).all()
    assert mixed.backend.decode.active is None


def test_graphs_with_prefix_kernels_have_stock_metadata_of_their_own(mixed, monkeypatch):
    """A stock graph points to the metadata of its capture, which no other capture may replace."""
    forward = GraphRunner._forward

    def both_layers(runner, ids, positions, batch):
        runner.attn_backend.forward_decode(*runner.qkv, mixed.window, batch)
        return forward(runner, ids, positions, batch)

    monkeypatch.setattr(GraphRunner, "_forward", both_layers)
    graphs = captured(mixed).backend.graphs
    traces = {key.variant_label: trace for key, (_, trace) in graphs.items()}
    assert traces == {None: ["stock", "stock"], "prefix": ["stock", "prefix"]}
    stock, beside = (["out_graph:capture"] + ["in_graph", *n * ["decode"]] * 3 for n in (2, 1))
    assert mixed.stock.calls == ["graph_state", *stock * 3]
    assert mixed.beside.calls == ["graph_state", *beside * 3]


def test_a_graph_replays_both_kinds_of_metadata(mixed):
    captured(mixed)
    mixed.stock.calls.clear(), mixed.beside.calls.clear()
    batch = mixed.batch(1)
    mixed.observe(batch)
    mixed.backend.init_forward_metadata_out_graph(batch)
    assert (mixed.stock.calls, mixed.beside.calls) == ([], ["out_graph"])
    mixed.observe(SimpleNamespace(forward_mode=batch.forward_mode, seq_lens_cpu=None))
    mixed.backend.init_forward_metadata_out_graph(batch)
    assert (mixed.stock.calls, mixed.beside.calls) == (["out_graph"], ["out_graph"])
