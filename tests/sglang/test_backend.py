"""The backend's own state machine with fake collaborators: eager steps, dummy batches, options.

Decode graphs and their two variants: test_graph_variants.py.
"""

import gc
import itertools
import logging
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefix_attn.engine.counters_of import counters_of
from sgl_prefix_attn.engine.runner_backend import find_observer
from sgl_prefix_attn.metrics.counters import KvSize
from sgl_prefix_attn.metrics.exporter import PrometheusExporter
from sgl_prefix_attn.records import Decision, HeadConfig
from sgl_prefix_attn.settings import Settings
from tests.sglang.fake_server import HKV, HQ, PLAIN_SERVER, D, Server
from tests.support.fake_sglang import LMCRadixCache
from tests.support.sinks import sinks_of


def test_eager_steps_equal_full_attention_planned_or_appended(server):
    for grown in range(1, 15):  # beyond the headroom of 8
        server.assert_attention(*server.eager_step(grown))
    assert server.backend.counters.plans == {"first": 1, "headroom": 1}
    assert not server.stock.calls


def test_rows_may_be_a_dimension_further(server):
    """As Gemma 3 passes them on a GPU."""
    batch, q, out = server.eager_step(1, as_model=lambda q: q.view(1, -1, HQ, D))
    server.assert_attention(batch, q, out)


@pytest.mark.parametrize("steps_before", [0, 1])  # an observed step is used once
def test_a_batch_that_was_not_observed_is_stock(server, steps_before):
    for grown in range(1, 1 + steps_before):
        server.eager_step(grown)
    batch = server.batch(1)  # SGLang's warm-up makes such batches
    server.backend.init_forward_metadata(batch)
    server.attend(batch)
    assert server.stock.calls == ["metadata", "decode"]


def test_the_soft_cap_of_a_layer_is_applied(server):
    server.layer.logit_cap = 0.5
    batch, q, out = server.eager_step(1)
    server.assert_attention(batch, q, out)
    server.layer.logit_cap = 0.0
    assert (server.expected(q, batch) - out).abs().max() > 1e-2


@pytest.mark.parametrize("cache", [None, LMCRadixCache()], ids=["prefix", "stock"])
def test_kv_that_is_in_the_pool_is_not_written_again(server, cache):
    """Models with fused rotary kernels write it themselves and pass save_kv_cache=False."""
    before = server.runner.token_to_kv_pool.k.clone()
    server.eager_step(1, cache, save_kv_cache=False)
    assert server.runner.token_to_kv_pool.k.equal(before)
    assert server.stock.saved == ([False] if cache else [])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_without_a_plan_is_an_error_where_it_breaks_a_promise(
    deterministic, monkeypatch, caplog
):
    monkeypatch.setitem(PLAIN_SERVER, "enable_deterministic_inference", deterministic)
    server = Server(monkeypatch, Settings(headroom=8))
    with caplog.at_level(logging.INFO):
        for grown, cache in ((1, None), (2, LMCRadixCache()), (3, LMCRadixCache())):
            server.eager_step(grown, cache)
    (said,) = (r for r in caplog.records if "tree:LMCRadixCache" in r.getMessage())
    assert said.levelno == (logging.ERROR if deterministic else logging.INFO)
    assert said.getMessage().endswith("and are not deterministic") == deterministic


def test_an_error_while_a_step_is_prepared_leaves_a_server_with_stock_steps(server, caplog):
    server.eager_step(1)
    batch = server.batch(2)
    batch.seq_lens_cpu = SimpleNamespace(numpy=lambda: 1 / 0)
    server.observe(batch)
    server.backend.init_forward_metadata(batch)
    assert (server.attend(batch)[1] == 7.0).all() and "ZeroDivisionError" in caplog.text
    assert (server.eager_step(3)[2] == 7.0).all()
    assert server.backend.counters.steps[Decision("stock", "internal_error")] == 1


def test_with_tensor_parallelism_it_is_raised(monkeypatch):
    server = Server(monkeypatch, tp_size=2)
    batch = server.batch(1)
    batch.seq_lens_cpu = SimpleNamespace(numpy=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        server.observe(batch)


def test_padding_rows_of_an_eager_step_are_zero(server, monkeypatch):
    batch = server.batch(1)
    server.observe(batch)
    server.backend.init_forward_metadata(batch)
    batch.seq_lens = torch.cat([batch.seq_lens, torch.ones(2, dtype=torch.int64)])
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(2, dtype=torch.int64)])
    monkeypatch.setattr(torch, "empty_like", lambda q: torch.full_like(q, float("nan")))
    out = server.attend(batch)[1]
    assert out[:3].isfinite().all() and (out[3:] == 0).all()


def test_an_unknown_wrapper_is_found_and_named(server, caplog):
    """SGLang wraps the backends of MiniMax, Dots and Inkling into classes of their own."""
    known = type("HybridLinearAttnBackend", (), {"full_attn_backend": server.backend})
    server.runner.attn_backend = type("InklingShortConvHybridAttnBackend", (known,), {})()
    assert find_observer(server.runner) is None
    for _ in range(2):
        batch = server.batch(1)
        server.backend.init_forward_metadata(batch)
    reason = "wrapped_backend:InklingShortConvHybridAttnBackend"
    assert caplog.text.count(reason) == 1
    find_observer(server.runner).observe(
        batch, SimpleNamespace(reqs=server.world.reqs, tree_cache=server.world.cache)
    )
    server.backend.init_forward_metadata(batch)
    assert (server.attend(batch)[1] == 7).all()
    assert server.backend.counters.steps == {Decision("stock", reason): 1}


@pytest.mark.parametrize("name", ["HybridLinearAttnBackend", "ShortConvHybridAttnBackend"])
def test_the_backend_is_found_in_those_of_linear_attention(server, name):
    pair = type("HybridAttnBackend", (), {"decode_backend": server.backend})()
    server.runner.attn_backend = type(name, (), {"full_attn_backend": pair})()
    assert find_observer(server.runner) is server.backend


def test_prefill_and_verify_go_to_stock(server):
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY):
        batch = server.batch(1, mode)
        server.observe(batch)
        server.backend.init_forward_metadata(batch)
    server.backend.init_forward_metadata_out_graph(server.batch(1, ForwardMode.TARGET_VERIFY))
    server.backend.init_forward_metadata_in_graph(server.batch(1, ForwardMode.TARGET_VERIFY))
    assert server.stock.calls == ["metadata"] * 3 + ["out_graph", "in_graph"]
    assert not server.backend.counters.steps


@pytest.fixture
def with_sinks(monkeypatch):
    return Server(monkeypatch, sinks=sinks_of(HeadConfig(HQ, HKV, D)))


def test_steps_of_layers_with_sinks(with_sinks):
    for grown in range(1, 12):
        with_sinks.assert_attention(*with_sinks.eager_step(grown))
    without = SimpleNamespace(**vars(with_sinks) | {"options": {}})
    batch, q, out = with_sinks.eager_step(12)
    assert not torch.allclose(out, Server.expected(without, q, batch), atol=1e-3)


def test_stock_attention_gets_the_sinks_of_a_layer_whose_kernels_fail(with_sinks, monkeypatch):
    got, decode = [], with_sinks.stock.forward_decode

    def noting(*args, **options):
        got.append(options.get("sinks"))
        return decode(*args, **options)

    monkeypatch.setattr(with_sinks.stock, "forward_decode", noting)
    monkeypatch.setattr(with_sinks.backend.decode.executor, "run", lambda layer: 1 / 0)
    assert (with_sinks.eager_step(1)[2] == 7).all()
    assert len(got) == 1 and got[0] is with_sinks.layer.sinks


@pytest.mark.parametrize("other", [None, torch.zeros(HQ)])
def test_sinks_that_kernels_were_not_tried_with_end_plans(with_sinks, other):
    assert (with_sinks.eager_step(1, sinks=other)[2] == 7).all()
    with_sinks.eager_step(2)
    reasons = {decision.reason for decision in with_sinks.backend.counters.steps}
    assert reasons == {"default", "layer_option:sinks"}


def test_a_layer_option_turns_all_later_steps_to_stock(server):
    _, _, out = server.eager_step(1, sinks=torch.zeros(HQ))
    assert (out == 7.0).all() and server.stock.calls == ["metadata", "decode"]
    _, _, out = server.eager_step(2)
    assert (out == 7.0).all()
    reasons = {decision.reason for decision in server.backend.counters.steps}
    assert reasons == {"default", "layer_option:sinks"}


@pytest.mark.parametrize("kernel", ["load", "append", "run"])
def test_kernels_that_fail_in_an_eager_step_leave_a_server_with_stock_steps(
    server, monkeypatch, caplog, kernel
):
    server.eager_step(1)
    server.world.reqs.pop()  # the next step loads a plan
    with monkeypatch.context() as patched:
        patched.setattr(server.backend.decode.executor, kernel, lambda *_, **__: 1 / 0)
        batch, _, out = server.eager_step(2)
    assert (out == 7.0).all() and server.stock.calls == ["metadata", "decode"]
    assert "prefix kernels failed in a decode step: division by zero" in caplog.text
    _, _, out = server.eager_step(3)
    assert (out == 7.0).all()
    assert server.backend.counters.steps[Decision("stock", "kernel_error")] == 1


@pytest.mark.parametrize(
    ("tp_size", "error"), [(2, ValueError("no")), (1, torch.AcceleratorError("lost"))]
)
def test_where_going_on_is_not_safe_they_are_raised(monkeypatch, tp_size, error):
    server = Server(monkeypatch, tp_size=tp_size)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(server.backend.decode.executor, "run", fail)
    with pytest.raises(type(error)) as raised:
        server.eager_step(1)
    assert raised.value is error


def test_behind_an_unknown_wrapper_graphs_are_stock(server):
    server.runner.attn_backend = SimpleNamespace(primary=server.backend)
    server.backend.init_cuda_graph_state(4, 4)
    server.backend.init_forward_metadata_out_graph(server.batch(1), in_capture=True)
    assert server.stock.calls == ["graph_state", "out_graph:capture"]
    assert not server.backend.can_run_prefix


@pytest.mark.parametrize(("limit", "rows"), [(65536, [8]), (2, [2]), (0, [])])
def test_the_second_fallback_has_rows_for_its_graphs_alone(monkeypatch, limit, rows):
    window = RadixAttention(HQ, D, D**-0.5, HKV, 1, sliding_window_size=16)
    server, got = Server(monkeypatch, Settings(max_variant_bs=limit), others=[window]), []
    monkeypatch.setattr(server.beside, "init_cuda_graph_state", lambda *sizes: got.append(sizes))
    server.backend.init_cuda_graph_state(8, 8)
    assert server.stock.calls == ["graph_state"] and got == [(n, n) for n in rows]


def test_cross_check_counts_a_layer_that_differs(monkeypatch):
    server = Server(monkeypatch, Settings(check=True, check_every=2))
    for grown, eager in ((1, False), (2, True), (3, False)):
        server.observe(server.batch(grown))
        assert server.backend.needs_eager_step is eager
        server.backend.init_forward_metadata(server.batch(grown))
        assert not server.backend.needs_eager_step
        server.attend(server.batch(grown))
    assert server.stock.calls == ["metadata", "decode"], "every second step"
    assert server.backend.counters.mismatches == 1, "the fake stock backend is wrong"


def test_a_prefill_in_between_is_part_of_no_steps_time(server):
    registry = CollectorRegistry()
    server.backend.counters.exporter = PrometheusExporter(KvSize(1, 1), registry)
    for grown in (1, 2, 3):
        server.eager_step(grown)
    server.observe(server.batch(3, ForwardMode.EXTEND))
    for grown in (4, 5):
        server.eager_step(grown)
    name = "sglang:prefix_attn_decode_interval_seconds_count"
    assert registry.get_sample_value(name, {"variant": "prefix"}) == 1


def test_rank_0_logs_with_the_size_of_its_own_kv(server, monkeypatch):
    size = []
    monkeypatch.setattr(
        "sgl_prefix_attn.engine.counters_of.DecodeLog", lambda *args: size.append(args)
    )
    layers = [server.layer]
    counters_of(server.runner, layers)
    server.parallel.tp_rank = 1
    assert counters_of(server.runner, layers).decode_log is None
    server.parallel.tp_rank, server.parallel.pp_rank = 0, 1  # another stage, the same steps
    assert counters_of(server.runner, layers).decode_log is None
    assert size == [(40, KvSize(num_layers=1, token_bytes=2 * HKV * D * 4))]


def test_steps_leave_nothing_behind(server):
    """Of what Python and numpy hold; an object a step, or a plan in eight of them, is more. What
    the steps only warm (Python and numpy keep freed objects for new ones) grows ever more slowly,
    so the parts are long and the one that grows least is judged."""

    def held_after(steps):
        for step in range(steps):
            server.eager_step(1 + step % 20)
        server.trace.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        held = [held_after(250) for _ in range(5)]
    finally:
        tracemalloc.stop()
    assert min(after - before for before, after in itertools.pairwise(held)) < 48 * 250
