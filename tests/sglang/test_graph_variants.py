"""Decode graphs in two variants, on SGLang's own runner methods with the plugin's hooks applied."""

import logging
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.shape_key import ShapeKey

from sgl_prefix_attn.settings import Settings
from tests.sglang.fake_graph_runner import (
    LIMIT,
    MIB,
    GraphRunner,
    assert_prefix,
    assert_stock,
    captured,
    labels,
    step,
)
from tests.sglang.fake_server import HQ, Server
from tests.support.fake_sglang import LMCRadixCache

OTHER_TREE = LMCRadixCache()  # makes a step stock


def decisions(server):
    return {(d.variant, d.reason) for d in server.backend.counters.steps}


# --- capture -------------------------------------------------------------------------------------


def test_every_size_is_captured_as_stock_and_then_as_prefix(server):
    runner = captured(server)
    assert labels(runner) == [(n, label) for n in (4, 2, 1) for label in (None, "prefix")]
    for key, (_, trace) in runner.backend.graphs.items():
        assert trace == [key.variant_label or "stock"]
    stock_capture = ["out_graph:capture"] + ["in_graph", "decode"] * 3
    assert server.stock.calls == ["graph_state"] + stock_capture * 3, "none from prefix captures"


def test_captures_touch_no_kv_but_the_padding_slot(server):
    before = server.runner.token_to_kv_pool.k[1:].clone()
    captured(server)
    assert server.runner.token_to_kv_pool.k[1:].equal(before)


def test_labels_compose_with_those_of_lora(server):
    runner = GraphRunner(server, sizes=(4,))
    runner.record_nolora_graph = True
    runner.capture()
    assert [label for _, label in labels(runner)] == [
        "lora", "lora+prefix", "nolora", "nolora+prefix"
    ]  # fmt: skip
    for lora_ids, label in ((["a", None, None], "lora"), ([None] * 3, "nolora"), (None, "nolora")):
        assert_prefix(runner, 1, lora_ids=lora_ids)
        assert runner._replay_graph_key == ShapeKey(4, None, f"{label}+prefix")
        assert_stock(runner, 1, cache=OTHER_TREE, lora_ids=lora_ids)
        assert runner._replay_graph_key == ShapeKey(4, None, label)


def test_a_capture_makes_the_next_step_plan(server):
    assert_prefix(captured(server), 1)
    assert_prefix(captured(server), 2)
    assert server.backend.counters.plans == {"first": 1, "capture": 1}


@pytest.mark.parametrize(("labels", "says"), [(1, "3 graphs"), (2, "6 graphs")])
def test_one_line_after_the_last_graph_says_what_the_second_set_costs(server, caplog, labels, says):
    runner = GraphRunner(server)
    runner.record_nolora_graph = labels == 2
    for label in ("prefix", "lora+prefix", "nolora+prefix"):
        runner.backend.cost[label] = 5 * MIB
    with caplog.at_level(logging.INFO, logger="sgl_prefix_attn"):
        runner.capture()
    (line,) = [record.getMessage() for record in caplog.records]
    assert says in line and f" {15 * labels} MiB" in line and LIMIT in line


# --- replay --------------------------------------------------------------------------------------


def test_no_row_of_padding_keeps_what_a_larger_batch_left_there(server):
    """A graph writes the rows of requests alone, and a model may take statistics over all."""
    runner, lane = captured(server), server.backend.decode
    assert_prefix(runner, 1)
    lane._graph_out[:] = torch.nan
    server.world.reqs = server.world.reqs[:2]
    assert_prefix(runner, 2)
    rows = lane._graph_out.isnan().any(2).any(1)
    assert rows.tolist() == [True, True, False, False]
    lane._graph_out[2:] = 3
    assert_prefix(runner, 3)  # the same plan
    assert (lane._graph_out[2:] == 3).all()


def test_stock_and_prefix_steps_of_one_size_alternate(server):
    runner = captured(server)
    for grown in range(1, 8):
        runner.keys.clear()
        if grown % 3 == 2:
            assert_stock(runner, grown, cache=OTHER_TREE)
            label = None
        else:
            assert_prefix(runner, grown)
            label = "prefix"
        # can_run_graph asks for the batch's own size, load_batch for the padded one.
        assert runner.keys == [ShapeKey(3, None, label), ShapeKey(4, None, label)]
    assert server.backend.counters.plans == {"first": 1, "lengths": 2}


def test_behind_hybrid_attn_backend_the_same(server):
    server.publish_config()
    server.runner.server_args.speculative_attention_mode = "prefill"
    server.runner.server_args.speculative_algorithm = None
    server.runner.model_config = SimpleNamespace(context_len=512)
    server.runner.attn_backend = HybridAttnBackend(server.runner, server.stock, server.backend)
    runner = captured(server)
    assert len(labels(runner)) == 6
    assert_prefix(runner, 1)
    assert_stock(runner, 2, cache=OTHER_TREE)
    assert_prefix(runner, 3)


def test_an_idle_batch_or_one_that_was_not_observed_is_stock(server):
    runner = captured(server)
    assert_prefix(runner, 1)
    assert_stock(runner, 2, observe=False)
    assert_prefix(runner, 3)
    idle = runner.live(4, ForwardMode.IDLE)
    server.observe(idle)
    runner.keys.clear()
    runner.step(idle)
    assert [key.variant_label for key in runner.keys] == [None, None]


def test_a_cross_checked_step_runs_eagerly(monkeypatch):
    server = Server(monkeypatch, Settings(headroom=8, check=True, check_every=2))
    runner = captured(server)
    assert_prefix(runner, 1)
    *_, replayed, calls = step(runner, 2)
    assert not replayed and calls == ["metadata", "decode"], "both backends"
    assert_prefix(runner, 3)


# --- what stays as SGLang made it ----------------------------------------------------------------


OTHERS = {
    "draft": lambda runner: setattr(runner.model_runner, "is_draft_worker", True),
    "verify": lambda runner: setattr(runner, "capture_forward_mode", ForwardMode.TARGET_VERIFY),
    "pdmux": lambda runner: setattr(runner, "enable_pdmux", True),
    "other_backend": lambda runner: (
        setattr(runner, "attn_backend", runner.server.stock),
        setattr(runner.model_runner, "attn_backend", runner.server.stock),
    ),
    "model": lambda runner: runner.server.backend._only_stock("kv_dtype:float8_e4m3fn"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_runners_keep_their_graphs_and_keys(server, kind):
    runner = GraphRunner(server)
    server.backend.decode.capture(with_plan=True)  # whatever the backend is up to
    OTHERS[kind](runner)
    assert runner._make_graph_key(3, 1, "x") == ShapeKey(3, 1, "x")
    runner.capture()
    assert labels(runner) == [(4, None), (2, None), (1, None)]
    assert all(trace == ["stock"] for _, trace in runner.backend.graphs.values())


# --- fewer prefix graphs -------------------------------------------------------------------------


def test_above_the_limit_there_is_only_stock(monkeypatch):
    server = Server(monkeypatch, Settings(headroom=8, max_variant_bs=2))
    runner = captured(server)
    assert labels(runner) == [(4, None), (2, None), (2, "prefix"), (1, None), (1, "prefix")]
    assert_stock(runner, 1)  # three requests, padded to four
    assert decisions(server) == {("stock", "graph_batch_size")}
    server.world.reqs.pop()
    assert_prefix(runner, 2)


def test_above_the_largest_graph_a_step_is_eager_and_decided_as_any_other(monkeypatch):
    server = Server(monkeypatch, Settings(headroom=8, max_variant_bs=1))
    runner = captured(server, sizes=(1, 2))
    assert_prefix(runner, 1, graph=False)
    server.world.reqs.pop()
    assert_stock(runner, 2)


def test_no_prefix_graphs_where_stock_is_forced(monkeypatch, caplog):
    server = Server(monkeypatch, Settings(policy="stock"))
    with caplog.at_level(logging.INFO, logger="sgl_prefix_attn"):
        runner = captured(server)
    assert len(labels(runner)) == 3 and not caplog.records
    assert_stock(runner, 1)
    assert decisions(server) == {("stock", "forced")}


def test_a_layer_option_during_capture_is_stock_for_good(server, caplog):
    runner = GraphRunner(server)
    runner.options = {"sinks": torch.zeros(HQ)}
    with caplog.at_level(logging.WARNING, logger="sgl_prefix_attn"):
        runner.capture()
    assert labels(runner) == [(4, None), (4, "prefix"), (2, None), (1, None)]
    assert server.stock.calls.count("out_graph:capture") == 3
    assert "metadata" not in server.stock.calls, "the stock graph's own is in place"
    assert [r.getMessage() for r in caplog.records if "layer_option:sinks" in r.getMessage()] == [
        "--attention-backend prefix: all steps run stock attention (layer_option:sinks)"
    ]
    assert_stock(runner, 1)
    assert decisions(server) == {("stock", "layer_option:sinks")}
