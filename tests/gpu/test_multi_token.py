"""Several tokens a request on a GPU: either family's kernel against fp64 causal attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sgl_prefix_attn import PrefixAttentionWrapper
from sgl_prefix_attn.execute.params import LayerParams
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.records import HeadConfig
from tests.support.forests import path_table
from tests.support.gpu_problems import DEVICE, TREES
from tests.support.kernels import FAMILIES, backend_of, planner_of, plans_of_cuts
from tests.support.multi_token import CHAIN_FAULTS, QUERY_LENS, MultiToken, multi_token
from tests.support.problems import assert_attention
from tests.support.running import executor_of, plan_several

SHAPES = {
    "llama": (HeadConfig(32, 8, 128), torch.bfloat16, 0.0),
    "qwen-7": (HeadConfig(28, 4, 128), torch.float16, 0.0),
    "mha": (HeadConfig(8, 8, 64), torch.bfloat16, 0.0),
    "group-16": (HeadConfig(32, 2, 128), torch.bfloat16, 20.0),
    "gemma": (HeadConfig(16, 8, 256), torch.bfloat16, 50.0),
}


def _verify():
    return path_table([(-1, 1024)], [0] * 37, [1 + (31 * i) % 130 for i in range(37)]), [4] * 37


def _extend():
    return path_table([(-1, 2000), (0, 64)], [1] * 9 + [0] * 3, [1] * 12), [8, 16, 33, 120] * 3


def _mixed():
    return TREES["mixed"](), [QUERY_LENS[i % len(QUERY_LENS)] for i in range(37)]


def _unshared():
    return path_table([], [-1] * 5, [1, 63, 4097, 1, 200]), [512, 63, 5, 1, 128]


CASES = {"verify": _verify, "extend": _extend, "mixed": _mixed, "unshared": _unshared}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def asked_of(case: str, shape: str = "llama", **options) -> MultiToken:
    heads, dtype, soft_cap = SHAPES[shape]
    return multi_token(*CASES[case](), heads, dtype, soft_cap=soft_cap, device=DEVICE, **options)


def plans_of(asked: MultiToken, family, most=5):
    requests = asked.requests
    planner = planner_of(backend_of(family, requests.heads, requests.dtype), headroom=0)
    return plans_of_cuts(planner, build_forest(requests.paths, asked.query_lens), most)


def check(plan, asked: MultiToken, family, fault=None) -> None:
    """Every query's output and LSE, from workspace and outputs that were poison before."""
    requests, queries = asked.requests, asked.queries
    backend = backend_of(family, requests.heads, requests.dtype)
    executor = executor_of(backend, requests, plan)
    workspace = executor.workspace
    executor.load(plan, requests.req_to_token, requests.pool)
    if fault is not None:
        words = workspace.words.cpu()
        fault(words)
        workspace.words.copy_(words)
        backend.fill(workspace, plan, requests.req_to_token, requests.pool)
    q = torch.full((len(queries.q) + 3, *queries.q.shape[1:]), math.nan).to(queries.q)
    q[:-3] = queries.q
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=DEVICE)
    executor.run(LayerParams(q, queries.k, queries.v, out, lse, queries.sm_scale, queries.soft_cap))
    assert out[-3:].isnan().all() and lse[-3:].isnan().all(), "padding rows were written"
    assert not workspace.counters.any(), "the next launch starts from counters of 0"
    assert_attention(queries, out[:-3], lse[:-3])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_every_case(case, shape, family):
    asked = asked_of(case, shape)
    for plan in plans_of(asked, family):
        check(plan, asked, family)


def test_pages(family):
    paths = path_table([(-1, 512)], [0] * 20, [1 + 16 * (i % 5) for i in range(20)])
    heads, dtype, _ = SHAPES["llama"]
    asked = multi_token(paths, [1 + i % 40 for i in range(20)], heads, dtype, page_size=16,
                        device=DEVICE)  # fmt: skip
    for plan in plans_of(asked, family):
        check(plan, asked, family)


@pytest.mark.parametrize("fault", CHAIN_FAULTS.values())
def test_a_planted_fault_is_found(fault, family):
    """In contexts so short that one token of 16-bit KV matters."""
    heads, dtype, _ = SHAPES["llama"]
    asked = multi_token(path_table([(-1, 5)], [0, 0], [2, 2]), [4, 4], heads, dtype, device=DEVICE)
    plan = next(iter(plans_of(asked, family, most=1)))
    check(plan, asked, family)
    with pytest.raises(AssertionError):
        check(plan, asked, family, fault)


def test_one_graph_serves_other_plans(family):
    """The wrapper's largest step first; then batches of other trees and tokens in its memory."""
    heads, dtype, _ = SHAPES["llama"]
    backend_of(family, heads, dtype)
    made = PrefixAttentionWrapper(
        32, 8, 128, device=DEVICE, dtype=dtype, kernels=family, sm_scale=1.5 * 128**-0.5
    )
    total = 256
    steps = [
        multi_token(paths, lens, heads, dtype, device=DEVICE)
        for paths, lens in (
            (path_table([(-1, 3000)], [0] * 64, [200] * 64), [4] * 64),
            (path_table([(-1, 900), (-1, 70)], [0, 1] * 8, [1] * 16), [16] * 16),
            (path_table([], [-1] * 2, [100, 1]), [156, 100]),
        )
    ]

    slots = max(len(asked.requests.k) for asked in steps)
    k, v = (torch.full((slots, 8, 128), math.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    q, out = (torch.full((total, 32, 128), math.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    plan_several(made, steps[0])
    made.run(q, (k, v), out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(q, (k, v), out=out)
    for asked in steps:
        assert np.sum(asked.query_lens) == total
        plan_several(made, asked)
        k[: len(asked.requests.k)], v[: len(asked.requests.k)] = asked.requests.k, asked.requests.v
        q.copy_(asked.queries.q)
        out.fill_(math.nan)
        graph.replay()
        assert_attention(asked.queries, out)
