"""What a failed capture leaves behind: the facts that variants.GraphVariants decides by.

Each case runs in a process of its own, because one of them breaks torch's allocator for good.
"""

import gc
import logging
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from sgl_prefix_attn.engine.graph_variants import GraphVariants

logger = logging.getLogger(__name__)


def out_of_memory(x):
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def python_error(x):
    x.clone()
    raise ValueError("cannot compile")


def illegal_call(x):
    x.sum().item()  # waits for the stream, which a capture does not allow


def hidden_illegal_call(x):
    try:
        x.sum().item()
    except RuntimeError:
        logger.info("the capture is broken now")
    raise ValueError("cannot compile")


def unjoined_stream(x):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add(1)
    raise ValueError("cannot compile")


def capture(fail, body, pool, stream, x, weights, y):
    """A graph of y = x @ weights, which cuBLAS splits and so needs a workspace for; its capture
    runs body at the end when fail is set."""
    torch.mm(x, weights, out=y)  # as SGLang warms up: the workspace is not of the graph's memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        torch.mm(x, weights, out=y)
        if fail:
            body(x)
    return graph


def attempt(body) -> dict:
    """Capture a stock graph, fail at a prefix graph, capture and replay stock graphs."""
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    x, y, z = (torch.zeros(64, width, **kind) for width in (8192, 4096, 4096))
    weights = torch.full((8192, 4096), 2**-12, **kind)
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        before = capture(False, body, pool, stream, x, weights, y)
        variants = GraphVariants(8, raise_failures=False)
        try:
            variants.capture(
                4, [2, 4], lambda: capture(True, body, pool, stream, x, weights, y), torch.cuda
            )
        except RuntimeError as error:
            return {"raised": str(error), "cause": type(error.__cause__).__name__}
        after = capture(False, body, pool, stream, x, weights, z)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    x.fill_(3.0)
    before.replay()
    after.replay()
    values = {float(y.min()), float(y.max()), float(z.min()), float(z.max())}
    torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    cached = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return {
        "problem": variants.problem(3),
        "values": values,
        "frees_memory": torch.cuda.memory_reserved() <= cached - (1 << 28),
    }


def in_process(body) -> dict:
    """Raises BrokenProcessPool when it aborts."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as workers:
        return workers.submit(attempt, body).result()


@pytest.mark.parametrize("body", [out_of_memory, python_error])
def test_a_capture_that_ended_costs_its_graph_alone(body):
    assert in_process(body) == {
        "problem": "graph_capture_failed", "values": {6.0}, "frees_memory": True
    }  # fmt: skip


@pytest.mark.parametrize("body", [illegal_call, hidden_illegal_call, unjoined_stream])
def test_a_capture_that_cannot_be_ended_stops_the_start(body):
    result = in_process(body)
    assert result["cause"] == "AcceleratorError"
    assert "PREFIX_ATTN_MAX_VARIANT_BS below 4" in result["raised"]
