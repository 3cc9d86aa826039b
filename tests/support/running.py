"""Runs plans on an executor whose memory is poisoned wherever nothing may be read."""

from __future__ import annotations

import math

import torch

from sgl_prefix_attn import PrefixDecodeWrapper
from sgl_prefix_attn.execute.backends.torch_backend import TorchBackend
from sgl_prefix_attn.execute.backends.triton_backend import TritonBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity
from tests.support.forests import chain, splitting_tiles

PADDING = 3  # rows of q and out above the batch, as in a captured graph


def executor(problem, *plans, use_triton=False, packed=True):
    """Room for the plans, and kv_indices full of the poison slot."""
    capacity = Capacity.for_plans(*plans)
    cpu = torch.device("cpu")
    if use_triton:
        tiles = splitting_tiles(problem.heads, packed)
        backend = TritonBackend(problem.heads, tiles, problem.dtype, cpu)
    else:
        backend = TorchBackend(problem.heads, problem.dtype, cpu)
    made = PlanExecutor(backend, capacity)
    made.workspace.kv_indices.fill_(problem.poison_slot)
    return made


def run(made, problem):
    """out and LSE, from outputs full of NaN; the padding rows must keep theirs."""
    batch = problem.q.shape[0]
    rows = batch + PADDING
    q = torch.full((rows, *problem.q.shape[1:]), math.nan, dtype=problem.dtype)
    q[:batch] = problem.q
    seq_lens = torch.cat([problem.seq_lens, torch.ones(PADDING, dtype=torch.int32)])
    out = torch.full_like(q, math.nan)
    lse = torch.full(q.shape[:2], math.nan)
    made.run(problem.layer(out, q=q, seq_lens=seq_lens, out_lse=lse))
    assert out[batch:].isnan().all() and lse[batch:].isnan().all(), "padding rows were written"
    return out[:batch], lse[:batch]


def wrapper(heads, dtype=torch.float32, **options):
    sizes = (heads.num_qo_heads, heads.num_kv_heads, heads.head_dim)
    return PrefixDecodeWrapper(*sizes, device="cpu", dtype=dtype, **options)


def paths_of(table):
    """The (node_id, length) lists that PrefixDecodeWrapper.plan takes."""
    rows = range(table.leaf.size)
    return [
        [(int(table.node_id[n]), int(table.length[n])) for n in chain(table, row)] for row in rows
    ]


def planned_wrapper(problem, **options):
    made = wrapper(problem.heads, problem.dtype, sm_scale=problem.sm_scale, **options)
    made.plan(paths_of(problem.paths), problem.seq_lens, problem.req_to_token, problem.pool)
    return made
