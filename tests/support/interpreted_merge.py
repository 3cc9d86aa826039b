"""The merge kernel of eval.ablate in Triton's interpreter; run by tests/eval/test_ablate.py."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval.ablate.separate_merge import SeparateMerge
from eval.ablate.strategies import Merges
from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.records import HeadConfig

assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("heads", [HeadConfig(8, 2, 64), HeadConfig(7, 1, 64)], ids=str)
def test_parts_are_weighed_by_their_lse(heads):
    generator = torch.Generator().manual_seed(0)
    group, hkv = heads.group_size, heads.num_kv_heads
    # request 0 has three parts, one of them without a token; 1 is not merged; 2 has a single part
    columns = [0, 3, 3, 4], [2, 0, 1, 1], [0, 3, 1, 0]
    offset, tile, query = (np.array(column, np.int32) for column in columns)
    out = torch.full((3, heads.num_qo_heads, 64), 7.0)
    partial_out = torch.full((3, hkv, W.TILE_ROWS, 64), float("nan"), dtype=torch.float16)
    state = torch.full((3, hkv, W.TILE_ROWS, 2), float("nan"))
    for t, i in zip(tile, query, strict=True):
        rows = slice(i * group, (i + 1) * group)
        values = torch.rand(hkv, group, 64, generator=generator) * 2 - 1
        partial_out[t, :, rows] = values.half()
        state[t, :, rows] = torch.rand(hkv, group, 2, generator=generator) * 4
    state[0, :, 3 * group : 4 * group, 0] = float("-inf")
    backend = SeparateMerge(heads, torch.float32, torch.device("cpu"), Merges(offset, tile, query))
    tickets = torch.tensor([99], dtype=torch.int32)
    workspace = SimpleNamespace(partial_out=partial_out, partial_state=state, tickets=tickets)
    backend.merge(workspace, SimpleNamespace(out=out))
    assert not tickets.any(), "the next launch counts from 0"
    for request in range(3):
        parts = range(offset[request], offset[request + 1])
        if not parts:
            assert (out[request] == 7.0).all()
            continue
        picked = [(tile[p], slice(query[p] * group, (query[p] + 1) * group)) for p in parts]
        lse = torch.stack([state[t, :, rows, 0] for t, rows in picked])
        scale = torch.stack([state[t, :, rows, 1] for t, rows in picked])
        weight = torch.softmax(lse * np.log(2), 0) * scale
        values = torch.stack([partial_out[t, :, rows].float() for t, rows in picked])
        want = (weight[..., None] * values).sum(0).flatten(0, 1)
        torch.testing.assert_close(out[request], want, rtol=1e-5, atol=1e-5)
