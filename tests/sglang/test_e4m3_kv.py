"""KV caches of float8_e4m3fn: real CPU engines, and the backend over a fake runner."""

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sgl_prefix_attn.engine.stock_alone import why_stock_alone
from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.settings import Settings
from tests.sglang.engine import STOCK, Config, plain
from tests.sglang.fake_server import HKV, HQ, D, Pool, Server
from tests.sglang.test_extends import PrefillServer
from tests.sglang.test_outputs import CHECKED

E4M3 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.4, 1.8
ENGINE = Config(
    "e4m3",
    (*plain("siblings", "staggered", "two_turns"), ("siblings", "tails_swapped")),
    {"kv_cache_dtype": "fp8_e4m3"},
    CHECKED,
)


@pytest.mark.engine
@pytest.mark.long
def test_outputs_equal_stock_and_passed_the_checks(engines):
    stock, prefix = engines.run(ENGINE, STOCK), engines.run(ENGINE)
    sound = [key for key in ENGINE.scenarios if not key[1]]
    for key in sound:
        assert prefix.outputs[key] == stock.outputs[key], f"{key} differs"
        found = {(step["variant"], step["reason"]) for step in prefix.steps[key]}
        assert found == {("prefix", "default")}
    steps = [step for key in sound for step in prefix.steps[key]]
    assert steps[-1]["mismatches"] == 0 and any(step["cross_check"] for step in steps)
    wrong = prefix.outputs["siblings", "tails_swapped"]
    assert wrong != stock.outputs["siblings", ""]


# --- the backend over a fake runner ---------------------------------------------------------------


def narrow(server, scales=True):
    """Give a server such a cache, and its layer scales."""
    server.runner.kv_cache_dtype, server.runner.token_to_kv_pool = E4M3, Pool(4096, E4M3)
    if scales:
        layer = server.layer
        layer.k_scale, layer.v_scale = torch.tensor(K_SCALE), torch.tensor(V_SCALE)
        layer.k_scale_float, layer.v_scale_float = K_SCALE, V_SCALE
    return server


def expected(server, q, rows, lens):
    pool = server.runner.token_to_kv_pool
    out, _ = full_attention(
        q.view(-1, HQ, D), pool.k, pool.v, server.world.req_to_token, rows, lens,
        sm_scale=D**-0.5, k_scale=K_SCALE, v_scale=V_SCALE,
    )  # fmt: skip
    return out.reshape(len(q), -1).float()


def test_decode_steps_write_and_read_by_a_layers_scales(monkeypatch):
    server = narrow(Server(monkeypatch))
    for grown in range(1, 4):
        batch, q, out = server.eager_step(grown)
        want = expected(server, q, batch.req_pool_indices, batch.seq_lens)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        pool, generator = server.runner.token_to_kv_pool, torch.Generator()
        generator.manual_seed(int(batch.seq_lens[0]))
        torch.randn(3, HQ * D, generator=generator)
        for cache, scale in ((pool.k, K_SCALE), (pool.v, V_SCALE)):
            given = torch.randn(3, HKV, D, generator=generator)
            assert cache[batch.out_cache_loc].float().equal((given / scale).to(E4M3).float())
    assert not server.stock.calls


def test_stock_attention_behind_a_failed_extend_gets_the_keys_as_they_were(monkeypatch):
    """FlashInfer's reads them beside the pool, and SGLang divides by scales in place."""
    server = narrow(PrefillServer(monkeypatch))
    given, run = [], server.backend.extends.lane.executor.run
    monkeypatch.setattr(
        server.stock, "forward_extend", lambda q, k, v, *args, **kw: given.extend((k, v)) or q
    )
    batch = server.extend_batch()
    q, out = server.extend(batch)
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor([3, 1, 7]))
    ends = torch.cat([torch.arange(n) - n + 1 for n in (3, 1, 7)]) + batch.seq_lens[rows]
    torch.testing.assert_close(out, expected(server, q, rows, ends), rtol=1e-5, atol=1e-5)
    assert not given

    def fails(*args):
        run(*args)
        raise RuntimeError("launch failed")

    server.backend.extends.lane.executor.run = fails
    server.extend(server.extend_batch())
    generator = torch.Generator().manual_seed(0)
    torch.randn(11, HQ * D, generator=generator)
    for tensor in given:
        assert tensor.equal(torch.randn(11, HKV, D, generator=generator))


@pytest.mark.parametrize(
    ("device", "dtype", "scales", "reason"),
    [
        ("cpu", torch.float32, False, None),
        ("cpu", torch.float32, True, "kv_scales"),  # torch_native does not read them
        ("cuda", torch.bfloat16, False, None),
        ("cuda", torch.bfloat16, True, None),
        ("cuda", torch.float32, True, "dtype:float32"),
    ],
)
def test_servers_with_such_a_cache(monkeypatch, device, dtype, scales, reason):
    server = narrow(Server(monkeypatch), scales)
    runner = server.runner
    runner.device, runner.dtype = device, dtype
    if device == "cuda":
        heads = RadixAttention(8, 64, 0.125, 2, 0)
        heads.k_scale, heads.k_scale_float = server.layer.k_scale, server.layer.k_scale_float
        runner.model = torch.nn.Sequential(heads)
    assert why_stock_alone(runner, Settings()) == reason


def test_scales_without_a_number_on_the_host_are_stock(monkeypatch):
    """Models set them so from --quantization-param-path."""
    server = narrow(Server(monkeypatch), True)
    heads = RadixAttention(8, 64, 0.125, 2, 0)
    heads.k_scale = server.layer.k_scale
    assert heads.k_scale_float is None
    server.runner.device, server.runner.dtype = "cuda", torch.bfloat16
    server.runner.model = torch.nn.Sequential(heads)
    assert why_stock_alone(server.runner, Settings()) == "kv_scales"
