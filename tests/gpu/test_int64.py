"""Offsets beyond 2^31 elements: KV pool, q and out, partial rows, req_to_token."""

import math
from dataclasses import replace

import pytest
import torch

from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.forest import build_forest
from tests.support.gpu_problems import DEVICE, LLAMA, TREES, gpu_problem
from tests.support.kernels import FAMILIES, backend_of, planner_of
from tests.support.problems import assert_attention
from tests.support.running import executor_of, load, run

LIMIT = 2**31
GIB = 2**30


@pytest.fixture(autouse=True)
def _enough_memory():
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * GIB:
        pytest.skip(f"needs 24 GiB of free device memory, {free / GIB:.0f} GiB are free")


@pytest.fixture(params=FAMILIES)
def backend(request):
    return backend_of(request.param)


def loaded(backend, problem, plan):
    made = executor_of(backend, problem, plan)
    load(made, problem, plan)
    return made


def test_a_pool_of_more_than_2_to_31_elements(backend):
    """The batch's slots stand at the far end, where an int32 offset would be negative."""
    paths = TREES["mixed"]()
    problem = gpu_problem(paths)
    slot_elements = LLAMA.num_kv_heads * LLAMA.head_dim
    offset = LIMIT // slot_elements + 1
    for name in ("k", "v"):
        small = getattr(problem, name)
        setattr(problem, name, small.new_full((offset + len(small), *small.shape[1:]), math.nan))
        getattr(problem, name)[offset:] = small
    assert problem.k.numel() > LIMIT
    problem.req_to_token = problem.req_to_token + offset
    made = loaded(backend, problem, planner_of(backend).plan(paths))
    assert_attention(problem, *run(made, problem))
    made.append(problem.seq_lens, problem.last_slots())
    assert_attention(problem, *run(made, problem))


def test_rows_of_q_and_out_beyond_2_to_31_elements(backend):
    paths = TREES["mixed"]()
    problem = gpu_problem(paths)
    batch, num_heads, head_dim = problem.q.shape
    stride = LIMIT // (batch - 2) // 128 * 128 + 128  # the last two rows lie beyond the limit
    assert (batch - 1) * stride > LIMIT

    def far_rows():
        flat = problem.q.new_empty((batch - 1) * stride + num_heads * head_dim)
        return flat.as_strided((batch, num_heads, head_dim), (stride, head_dim, 1))

    q, out = far_rows(), far_rows()
    q.copy_(problem.q)
    out.fill_(math.nan)
    # merged rows and directly written ones
    for strategy in ("naive", "query") if backend.splits_nodes else ("calibrated",):
        made = loaded(backend, problem, planner_of(backend, strategy=strategy).plan(paths))
        made.run(problem.layer(out, q=q))
        assert_attention(problem, out.contiguous())
        out.fill_(math.nan)


def test_partial_results_beyond_2_to_31_elements(backend):
    """The plan's words with every partial tile and place moved to the far end."""
    problem = gpu_problem(TREES["one_root_long"]())
    forest = build_forest(problem.paths)
    planner = planner_of(backend)
    cut = max(planner.cuts(forest), key=lambda cut: (cut.split_off == 0, cut.parts.max()))
    plan = planner.serialize(forest, cut)
    per_tile = LLAMA.num_kv_heads * plan.tile_rows * LLAMA.head_dim
    offset = LIMIT // per_tile + 1
    words = plan.words.copy()
    size = W.item_words(LLAMA.group_size, plan.tile_rows)
    items = words[W.HEADER_WORDS :][: plan.num_items * size].reshape(-1, size)
    items[items[:, W.I_PARTS] > 1, W.I_PARTIAL] += offset
    assert (items[:, W.I_PARTS] > 1).any()
    moved = replace(plan, words=words, num_partial_tiles=plan.num_partial_tiles + offset)
    made = loaded(backend, problem, moved)
    assert made.workspace.partial_out.numel() > LIMIT
    assert_attention(problem, *run(made, problem))


def test_rows_of_req_to_token_beyond_2_to_31_elements(backend):
    paths = TREES["deep"]()
    problem = gpu_problem(paths)
    plan = planner_of(backend).plan(paths)
    rows, columns = problem.req_to_token.shape
    stride = LIMIT // (rows - 4)
    # as wide as its stride: a view of narrower rows would be copied into a dense table
    table = torch.empty(rows, stride, dtype=torch.int32, device=DEVICE)
    table[:, :columns].copy_(problem.req_to_token)
    assert int(problem.pool.max()) * stride > LIMIT
    made = executor_of(backend, problem, plan)
    made.load(plan, table, problem.pool)
    assert_attention(problem, *run(made, problem))
