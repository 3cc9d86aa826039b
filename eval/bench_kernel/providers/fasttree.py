"""FastTree (MLSys'25) from a checkout of its artifact: `fasttree`, --fasttree-path DIR."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Provider, Runnable, Unsupported

_SOURCE = "kernel_bench/fasttree.py"
# The artifact's own settings (kernel_bench/benchmark.py): query tiles by GQA group size.
_QUERY_TILES = {1: [64, 16], 4: [16, 4], 16: [4, 1]}
_KV_TILES = [32, 32]
_KV_SPLITS = [1024, 128]
_PARALLELISM = ([132, 528], [132, 132])
_COSTS = (0.66, 0.33, 0.1)


class FastTree(Provider):
    name = "fasttree"

    def __init__(self, path: str | None):
        self._path = None if path is None else Path(path) / _SOURCE

    def load(self) -> ModuleType:
        name = "fasttree_artifact"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self._path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return sys.modules[name]

    def available(self) -> str | None:
        if self._path is None:
            return "needs --fasttree-path"
        if not self._path.is_file():
            return f"no {_SOURCE} under --fasttree-path"
        return None if torch.cuda.is_available() else "needs an NVIDIA GPU"

    def prepare(self, case: Case) -> Runnable:
        tree, group_size = case.tree, case.heads.group_size
        if tree.counts[0] != 1:
            raise Unsupported("trees with more than one root")
        if group_size not in _QUERY_TILES:
            raise Unsupported(f"group size {group_size}")
        module, outs, step = self.load(), case.new_out(), ()
        # Its KV pool is contiguous, node after node; ours is permuted.
        own = torch.cat([case.node_slots(level).flatten() for level in range(len(tree.counts))])

        def plan() -> None:
            nonlocal step
            params = module.FastTreeParams()
            params.set_values(*_COSTS)
            params.set_q_tile_sizes(list(_QUERY_TILES[group_size]))
            params.set_kv_tile_sizes(list(_KV_TILES))
            params.set_kv_group_num(group_size)
            nodes, offsets = _tree_info(case)
            with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
                (entries, *aux), _ = module.fasttree_preparation(
                    nodes, offsets, tree.batch_size, *case.head_sizes, list(_KV_SPLITS),
                    *[list(x) for x in _PARALLELISM], params,
                )  # fmt: skip
            slots = torch.where(entries >= 0, own[entries.clamp(min=0).long()], entries)
            # Preparation may have changed the tiles: running with those it was given drops queries.
            step = (slots, *aux, params.TSQs, params.TSKs)

        def run(layer: int) -> torch.Tensor:
            k, v, out = case.k[layer], case.v[layer], outs[layer]
            module.fasttree_decode(case.q, k, v, out, *step, case.sm_scale)
            return out

        plan()
        return Runnable(run, plan)


def _tree_info(case: Case) -> tuple[list[SimpleNamespace], list[int]]:
    """Return nodes in level order with the fields that FastTree reads, and their KV offsets."""
    tree = case.tree
    # The last level is the requests' own.
    parents = [*case.paths.parent.tolist(), *case.paths.leaf.tolist()]
    lengths = np.repeat(tree.lengths, tree.counts)
    nodes = [
        SimpleNamespace(parent=parent, id=i, seqlen=length, num_children=0, requests=[])
        for i, (parent, length) in enumerate(zip(parents, lengths.tolist(), strict=True))
    ]
    for parent in parents:
        if parent >= 0:
            nodes[parent].num_children += 1
    for request in range(tree.batch_size):
        node = len(nodes) - tree.batch_size + request
        while node >= 0:
            nodes[node].requests.append(request)
            node = parents[node]
    return nodes, [0, *np.cumsum(lengths).tolist()]
