"""What eval.sanitize runs: a few requests and one layer, through every kernel of a family."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from sgl_prefix_attn.execute import reference
from sgl_prefix_attn.execute.backends import gluon_backend
from sgl_prefix_attn.execute.backends.choice import new_backend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.kernels import layout
from sgl_prefix_attn.kernels.gluon import words as W
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.tile_defaults import default_tile_set
from sgl_prefix_attn.predict.startup import default_costs
from sgl_prefix_attn.records import HeadConfig, PathTable

SLOT = "slot"  # a fault: a KV slot beyond the pool
HEADS = HeadConfig(8, 2, 64)
_SHARED = ((-1, 150), (0, 70), (1, 40))  # (parent, length) of the nodes: a chain
_LEAF = (2,) * 2 + (1,) * 16 + (0,) * 3 + (-1,) * 3
_TAILS = tuple(1 + 11 * i % 60 for i in range(22)) + (300, 1)


def run_case(name: str, plant: bool = False, device: str = "cuda") -> int:
    """Run every kernel of a case, on a few requests and one layer; check against full attention."""
    paths = _paths()
    req_to_token, num_slots = _slots(paths)
    batch = paths.leaf.size
    generator = torch.Generator().manual_seed(0)
    shape = (num_slots, HEADS.num_kv_heads, HEADS.head_dim)
    q = torch.randn(batch, HEADS.num_qo_heads, HEADS.head_dim, generator=generator).bfloat16()
    k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    pool, seq_lens = torch.arange(batch), torch.from_numpy(paths.seq_lens.copy())
    want, _ = reference.full_attention(
        q, k, v, req_to_token, pool, seq_lens, sm_scale=HEADS.head_dim**-0.5
    )
    last = req_to_token[pool, seq_lens.long() - 1].long()
    if plant:
        req_to_token[0, 3] = num_slots + (1 << 22)

    backend, plans = CASES[name](paths, torch.device(device))
    q, k, v, seq_lens, last = (t.to(device) for t in (q, k, v, seq_lens, last))
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=device)
    largest = 0.0
    for plan in plans:
        executor = PlanExecutor(backend, Capacity.for_plans(plan))
        executor.load(plan, req_to_token.to(device), pool.to(device))
        executor.append(seq_lens, last)
        out.fill_(float("nan"))
        executor.run(LayerParams(q, k, v, seq_lens, out, lse, HEADS.head_dim**-0.5, 0.0))
        error = (out.cpu().double() - want).norm() / want.norm()
        print(f"case {name}: {batch} requests, {plan.stats.num_items} items, error {error:.2e}")
        largest = max(largest, float(error.nan_to_num(1.0)))
    return 0 if largest < 1e-2 else 1


def _packs(paths: PathTable, device: torch.device):
    """A backend and one plan that uses every queue."""
    tiles = default_tile_set(device, HEADS)
    tiles = replace(tiles, packed_tickets=1)
    plan = Planner(
        HEADS, tile_set=tiles, strategy="naive", costs=default_costs(device, HEADS)
    ).plan(paths)
    unused = [i for i in range(len(tiles.tiles)) if plan.words[layout.H_QUEUES + 2 * i + 1] == 0]
    assert not unused and plan.num_partials, f"queues {unused} of the case are empty"
    return new_backend(device, HEADS, torch.bfloat16, tiles), [plan]


def _row_tiles(paths: PathTable, device: torch.device):
    """A backend, a plan of whole tiles for two warpgroups, and one of tiles in parts."""
    backend = gluon_backend.GluonBackend(HEADS, torch.bfloat16, device)
    planner = RowTilePlanner(HEADS, num_sms=backend.num_sms)
    forest = build_forest(paths)
    cuts = sorted(planner.cuts(forest), key=lambda cut: (cut.parts.max(), -cut.most_queries))
    whole, split = cuts[0], cuts[-1]
    assert whole.parts.max() == 1 < split.parts.max(), "no tile of the case is split"
    assert whole.most_queries * HEADS.group_size > W.HALF_ROWS
    return backend, [planner.serialize(forest, cut) for cut in (whole, split)]


CASES = {"packs": _packs, "row_tiles": _row_tiles}


def _paths() -> PathTable:
    parent, length = zip(*_SHARED, strict=True)
    depth = [0, *np.cumsum(length).tolist()]
    seq_lens = [depth[node + 1] + tail for node, tail in zip(_LEAF, _TAILS, strict=True)]
    return PathTable.of(parent, length, _LEAF, seq_lens)


def _slots(paths: PathTable) -> tuple[torch.Tensor, int]:
    """Make req_to_token int32 [B, longest] with slots in random order, and count the slots."""
    shared = int(paths.length.sum())
    num_slots = 1 + shared + sum(_TAILS)
    slots = 1 + np.random.default_rng(0).permutation(num_slots - 1)
    table = np.zeros((paths.leaf.size, int(paths.seq_lens.max())), np.int32)
    used = shared
    for row, (length, tail) in enumerate(zip(paths.seq_lens.tolist(), _TAILS, strict=True)):
        table[row, : length - tail] = slots[: length - tail]
        table[row, length - tail : length] = slots[used : used + tail]
        used += tail
    return torch.from_numpy(table), num_slots
