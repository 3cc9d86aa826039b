"""Offsets beyond 2^31 elements: KV pool, q and out, partial rows, req_to_token."""

import math
from dataclasses import replace

import pytest
import torch

from sgl_prefix_attn.kernels import layout as L
from tests.support.gpu_problems import DEVICE, LLAMA, TREES, gpu_problem, planner
from tests.support.problems import assert_attention
from tests.support.running import executor, loaded, run

LIMIT = 2**31
GIB = 2**30


@pytest.fixture(autouse=True)
def _enough_memory():
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * GIB:
        pytest.skip(f"needs 24 GiB of free device memory, {free / GIB:.0f} GiB are free")


def test_a_pool_of_more_than_2_to_31_elements():
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
    made = loaded(problem, planner().plan(paths))
    assert_attention(problem, *run(made, problem))
    made.append(problem.seq_lens, problem.last_slots())
    assert_attention(problem, *run(made, problem))


def test_rows_of_q_and_out_beyond_2_to_31_elements():
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
    for strategy in ("naive", "query"):  # merged rows and directly written ones
        made = loaded(problem, planner(strategy=strategy).plan(paths))
        made.run(problem.layer(out, q=q))
        assert_attention(problem, out.contiguous())
        out.fill_(math.nan)


def test_partial_rows_beyond_2_to_31_elements():
    """The plan's words with every partial row moved to the far end."""
    paths = TREES["mixed"]()
    problem = gpu_problem(paths)
    plan = planner(strategy="naive").plan(paths)
    offset = LIMIT // (LLAMA.num_qo_heads * LLAMA.head_dim) + 1
    words = plan.words.copy()
    entries = words[words[L.H_ENTRIES] : words[L.H_MERGES]].reshape(-1, L.ENTRY_WORDS)
    entries[entries[:, L.E_PARTIAL] != L.DIRECT, L.E_PARTIAL] += offset
    merges = words[words[L.H_MERGES] :][: words[L.H_NUM_MERGES] * L.MERGE_WORDS]
    merges.reshape(-1, L.MERGE_WORDS)[:, L.M_PARTIAL] += offset
    assert plan.num_partials > 0 and merges.size
    moved = replace(plan, words=words, num_partials=plan.num_partials + offset)
    made = loaded(problem, moved)
    assert made.workspace.partial_out.numel() > LIMIT
    assert_attention(problem, *run(made, problem))


def test_rows_of_req_to_token_beyond_2_to_31_elements():
    paths = TREES["deep"]()
    problem = gpu_problem(paths)
    plan = planner().plan(paths)
    rows, columns = problem.req_to_token.shape
    stride = LIMIT // (rows - 4)
    flat = torch.empty((rows - 1) * stride + columns, dtype=torch.int32, device=DEVICE)
    table = flat.as_strided((rows, columns), (stride, 1))
    table.copy_(problem.req_to_token)
    assert int(problem.pool.max()) * stride > LIMIT
    made = executor(problem, plan)
    made.load(plan, table, problem.pool)
    assert_attention(problem, *run(made, problem))
