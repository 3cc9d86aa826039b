"""What eval.sanitize runs: a few requests and one layer, through every kernel of a family."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from eval.bench_kernel.case import build_batch_case
from eval.bench_kernel.oracle import Oracle, Wrong
from sgl_prefix_attn.execute.backends import hopper_backend
from sgl_prefix_attn.execute.backends.choice import new_backend
from sgl_prefix_attn.execute.backends.family import HOPPER, PORTABLE
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig, PathTable

SLOT = "slot"  # a fault: a KV slot beyond the pool
HEADS = HeadConfig(8, 2, 64)
_SHARED = ((-1, 150), (0, 70), (1, 40))  # (parent, length) of the nodes: a chain
_LEAF = (2,) * 2 + (1,) * 16 + (0,) * 3 + (-1,) * 3
_TAILS = tuple(1 + 11 * i % 60 for i in range(22)) + (300, 1)


def run_case(name: str, plant: bool = False, device: str = "cuda") -> int:
    """Run every kernel of a case, on a few requests and one layer; check against full attention."""
    paths = _paths()
    unique = build_forest(paths).unique_tokens
    case = build_batch_case(paths, unique, HEADS, 1, torch.bfloat16, torch.device(device))
    case = replace(case, k=case.k[:1], v=case.v[:1])
    oracle, rows = Oracle(case), torch.arange(case.batch_size, device=case.device)
    last, table = case.req_to_token[rows, case.seq_lens - 1], case.req_to_token.clone()
    if plant:
        table[0, 3] = case.k[0].shape[0] + (1 << 22)
    backend, plans = CASES[name](paths, case.device)
    status = 0
    for plan in plans:
        (out,), lse = case.new_out(), torch.empty(case.q.shape[:2], device=case.device)
        executor = PlanExecutor(backend, Capacity.for_plans(plan))
        executor.load(plan, table, rows)
        executor.append(case.seq_lens, last.long())
        layer = (case.q, case.k[0], case.v[0], out, lse, case.sm_scale, 0.0)
        executor.run(LayerParams(*layer))
        wrong = None
        try:
            oracle.judge([out], name)
        except Wrong as error:
            wrong = error
        print(f"case {name}: {rows.numel()} requests, {plan.stats.num_items} items, "
              f"{wrong or 'right'}")  # fmt: skip
        status |= wrong is not None
    return status


def _portable(paths: PathTable, device: torch.device):
    """A backend, a plan whose nodes are split off and merged by query, and one of whole tiles."""
    backend = new_backend(PORTABLE, device, HEADS, torch.bfloat16)
    sizes = {"num_sms": backend.num_sms, "tile_rows": backend.tile_rows}
    split = Planner(HEADS, **sizes, strategy="naive", splits_nodes=True).plan(paths)
    assert split.stats.num_partials, "no node of the case is split off"
    return backend, [split, Planner(HEADS, **sizes).plan(paths)]


def _hopper(paths: PathTable, device: torch.device):
    """A backend, a plan of whole tiles for two warpgroups, and one of tiles in parts."""
    backend = hopper_backend.HopperBackend(HEADS, torch.bfloat16, device)
    planner = Planner(HEADS, num_sms=backend.num_sms)
    forest = build_forest(paths)
    cuts = sorted(planner.cuts(forest), key=lambda cut: (cut.parts.max(), -cut.most_queries))
    whole, split = cuts[0], cuts[-1]
    assert whole.parts.max() == 1 < split.parts.max(), "no tile of the case is split"
    assert whole.most_queries * HEADS.group_size > W.HALF_ROWS
    return backend, [planner.serialize(forest, cut) for cut in (whole, split)]


CASES = {PORTABLE: _portable, HOPPER: _hopper}


def _paths() -> PathTable:
    parent, length = zip(*_SHARED, strict=True)
    depth = [0, *np.cumsum(length).tolist()]
    seq_lens = [depth[node + 1] + tail for node, tail in zip(_LEAF, _TAILS, strict=True)]
    return PathTable.of(parent, length, _LEAF, seq_lens)
