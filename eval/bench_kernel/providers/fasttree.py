"""FastTree (MLSys'25) from a checkout of its artifact: `fasttree`, --fasttree-path DIR."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.providers.provider import Provider, Unsupported

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

    def available(self) -> str | None:
        if self._path is None:
            return "needs --fasttree-path"
        if not self._path.is_file():
            return f"no {_SOURCE} under --fasttree-path"
        return None if torch.cuda.is_available() else "needs an NVIDIA GPU"

    def prepare(self, case: Case) -> FastTreeRunnable:
        if case.tree.counts[0] != 1:
            raise Unsupported("trees with more than one root")
        if case.heads.group_size not in _QUERY_TILES:
            raise Unsupported(f"group size {case.heads.group_size}")
        return FastTreeRunnable(case, _load(self._path))


class FastTreeRunnable:
    def __init__(self, case: Case, module: ModuleType):
        self._case = case
        self._module = module
        self._out = case.new_out()
        # Its KV pool is contiguous, node after node; ours is permuted.
        self._slots = torch.cat([slots.reshape(-1) for slots in case.node_slots])
        self.plan()

    def plan(self) -> None:
        case = self._case
        params = self._module.FastTreeParams()
        params.set_values(*_COSTS)
        params.set_q_tile_sizes(list(_QUERY_TILES[case.heads.group_size]))
        params.set_kv_tile_sizes(list(_KV_TILES))
        params.set_kv_group_num(case.heads.group_size)
        nodes, offsets = _tree_info(case)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
            aux, _ = self._module.fasttree_preparation(
                nodes, offsets, case.tree.batch_size, *case.head_sizes, list(_KV_SPLITS),
                *[list(x) for x in _PARALLELISM], params,
            )  # fmt: skip
        entries = aux[0]
        slots = torch.where(entries >= 0, self._slots[entries.clamp(min=0).long()], entries)
        self._aux = (slots, *aux[1:])
        # Preparation may have changed the tiles: running with those it was given drops queries.
        self._tiles = (params.TSQs, params.TSKs)

    def run(self, layer: int) -> torch.Tensor:
        case = self._case
        self._module.fasttree_decode(
            case.q, case.k[layer], case.v[layer], self._out[layer], *self._aux, *self._tiles,
            case.sm_scale,
        )  # fmt: skip
        return self._out[layer]


def _load(path: Path) -> ModuleType:
    name = "fasttree_artifact"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _tree_info(case: Case) -> tuple[list[SimpleNamespace], list[int]]:
    """Return nodes in level order with the fields that FastTree reads, and their KV offsets."""
    tree = case.tree
    first = [sum(tree.counts[:level]) for level in range(len(tree.counts) + 1)]
    nodes, offsets = [], [0]
    for level, (count, length) in enumerate(zip(tree.counts, tree.lengths, strict=True)):
        for node in range(count):
            parent = first[level - 1] + tree.parent(level, node) if level else -1
            if level:
                nodes[parent].num_children += 1
            nodes.append(
                SimpleNamespace(
                    parent=parent, id=len(nodes), seqlen=length, num_children=0, requests=[]
                )
            )
            offsets.append(offsets[-1] + length)
    for level, row in enumerate(tree.node_of_request().tolist()):
        for request, node in enumerate(row):
            nodes[first[level] + node].requests.append(request)
    return nodes, offsets
