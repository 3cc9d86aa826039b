"""A prefix capture that fails: what goes on without it, and when the start must fail."""

import gc
import logging
import weakref

import pytest
import torch
from sglang.srt.model_executor.runner.shape_key import ShapeKey

from sgl_prefix_attn.engine import graph_variants
from sgl_prefix_attn.records import Decision
from tests.sglang.fake_graph_runner import (
    LIMIT,
    GraphRunner,
    assert_prefix,
    assert_stock,
    captured,
    labels,
    step,
)
from tests.sglang.fake_server import Server

PREFIX_2 = ShapeKey(2, None, "prefix")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("cannot compile")]
)
def test_a_failed_capture_leaves_the_larger_graphs(server, caplog, error):
    runner = GraphRunner(server)
    runner.backend.failing[PREFIX_2] = error
    with caplog.at_level(logging.WARNING, logger="sgl_prefix_attn"):
        runner.capture()
    assert labels(runner) == [(4, None), (4, "prefix"), (2, None), (1, None)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(error) in line and "graph_capture_failed" in line and LIMIT in line
    assert_prefix(runner, 1)
    server.world.reqs.pop()
    assert_stock(runner, 2)
    assert server.backend.counters.steps[Decision("stock", "graph_capture_failed")] == 1


def failing(server, size, label, **options):
    runner = GraphRunner(server, **options)
    runner.backend.failing[ShapeKey(size, None, label)] = ValueError("cannot compile")
    return runner


def test_a_size_whose_second_label_failed_has_no_prefix_graph(server):
    runner = failing(server, 4, "nolora+prefix")
    runner.record_nolora_graph = True
    runner.capture()
    assert_stock(runner, 1, lora_ids=["a"] * 3)


def test_kernels_that_could_not_be_captured_are_not_tried_without_a_graph(server):
    runner = failing(server, 2, "prefix", sizes=(1, 2))
    runner.capture()
    _, _, out, replayed, _ = step(runner, 1)  # three requests
    assert (out == 7.0).all() and not replayed
    assert server.backend.counters.steps == {Decision("stock", "graph_capture_failed"): 1}


def test_a_second_capture_does_not_trust_the_first(server):
    captured(server)
    runner = failing(server, 4, "prefix")
    runner.capture()
    server.world.reqs[:] = server.world.reqs[:1]
    assert_stock(runner, 1)


@pytest.mark.parametrize("name", ["CUDAGraph", "BreakableCUDAGraph"])
def test_a_graph_whose_capture_failed_is_kept_until_all_are_captured_anew(
    server, monkeypatch, name
):
    """And nothing else: what the capture computed is gone at once, without a collection."""
    kind = type(name, (), {})  # torch's cannot be made without a GPU

    def failing_capture():
        graph, hidden_states = kind(), torch.ones(1)
        graphs.append(weakref.ref(graph))
        others.append(weakref.ref(hidden_states))
        raise ValueError("cannot compile")

    graphs, others = [], []
    # pytest keeps records of errors, and so the graphs
    monkeypatch.setattr(graph_variants.logger, "error", lambda *args, **options: None)
    variants = server.backend.variants
    gc.disable()
    try:
        variants.capture(4, [4], failing_capture, GraphRunner(server).device_module)
        assert others[0]() is None
    finally:
        gc.enable()
    gc.collect()
    assert graphs[0]() is not None
    variants.reset()
    gc.collect()
    assert graphs[0]() is None


def broken_context(server, runner):
    runner.device_module.broken = True
    return RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")


def capture_not_ended(server, runner):
    return torch.AcceleratorError("operation failed due to a previous error during capture")


def tensor_parallel(server, runner):
    server.backend.variants.raise_failures = True
    return torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("failure", [broken_context, capture_not_ended, tensor_parallel])
def test_where_going_on_is_not_safe_the_start_fails_and_says_what_to_set(server, failure):
    runner = GraphRunner(server)
    runner.backend.failing[PREFIX_2] = error = failure(server, runner)
    with pytest.raises(RuntimeError, match=f"batch size 2 failed.*{LIMIT} below 2") as raised:
        runner.capture()
    assert raised.value.__cause__ is error


def test_a_stock_capture_that_fails_is_sglangs_own_error(server):
    runner = GraphRunner(server)
    runner.backend.failing[ShapeKey(2)] = error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        runner.capture()
    assert raised.value is error


def test_tensor_parallel_ranks_raise(monkeypatch):
    assert not Server(monkeypatch).backend.variants.raise_failures
    assert Server(monkeypatch, tp_size=2).backend.variants.raise_failures
