"""Who answers: what a server with the plugin runs, and the stock kernels of bench_kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from eval.bench_kernel.providers import make_providers
from eval.bench_kernel.providers.provider import Provider
from eval.papers.case import Case
from eval.papers.counts import merge_bytes
from sgl_prefix_attn.api.planned_attention import packs, row_tiles
from sgl_prefix_attn.execute.backends.choice import why_no_row_tiles
from sgl_prefix_attn.execute.backends.family import AUTO, ROW_TILES, choose_family
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.predictor import Predictor, RowTilePredictor
from sgl_prefix_attn.predict.startup import gpu_key
from sgl_prefix_attn.step.evaluate import evaluate
from sgl_prefix_attn.step.policy import BatchFacts


class ServerRunnable:
    """The family of kernels and the plan that a server would choose; facts: for the result file.

    family        row tiles or packs
    server_runs   kernels that the policy gives such a batch, "prefix" without a calibration (CPU)
    merge_bytes   of partial results, written and read again
    """

    def __init__(self, case: Case):
        self._case = case
        why_not = why_no_row_tiles(case.device, case.heads, case.dtype)
        family = choose_family(AUTO, "calibrated", why_not)
        make = row_tiles if family.name == ROW_TILES else packs
        backend, planner = make(case.heads, case.dtype, case.device, case.page_size)
        evaluation = evaluate(case.batch.paths, BatchFacts(), planner, _predictor(case, family))
        plan = evaluation.plan
        self._executor = PlanExecutor(backend, Capacity.for_plans(plan))
        rows = torch.arange(plan.batch_size, device=case.device)
        self._executor.load(plan, case.req_to_token, rows)
        self._outs = case.new_out()
        self.facts = {
            "family": family.name,
            "server_runs": evaluation.decision.variant,
            "merge_bytes": merge_bytes(plan.stats.num_partials, case.heads),
            "items": plan.stats.num_items,
            "kv_tokens_read": plan.stats.kv_tokens_read,
        }

    def run(self, layer: int) -> torch.Tensor:
        case, out = self._case, self._outs[layer]
        k, v = case.k[layer], case.v[layer]
        self._executor.run(LayerParams(case.q, k, v, case.seq_lens, out, None, case.sm_scale, 0.0))
        return out


def _predictor(case: Case, family) -> Predictor | None:
    if case.device.type != "cuda":
        return None
    key = gpu_key(case.device, case.heads, case.dtype, case.page_size)
    return _cached_predictor(key, case.device.index, family.name == ROW_TILES)


@cache
def _cached_predictor(key, index, row_tiles: bool) -> Predictor:
    num_sms = torch.cuda.get_device_properties(index).multi_processor_count
    calibration = store.find(key, num_sms).calibration
    return (RowTilePredictor if row_tiles else Predictor)(calibration)


class Server(Provider):
    """What a server with the plugin runs on such a GPU."""

    name = "prefix"
    module = "sgl_prefix_attn"
    needs_cuda = False
    runnable = ServerRunnable


def providers(names: tuple[str, ...]) -> list[Provider]:
    """Make providers in the given order: `prefix`, and those of eval/bench_kernel."""
    make = {"prefix": Server}
    return [make.get(name, partial(_stock, name))() for name in names]


def _stock(name: str) -> Provider:
    return make_providers([name])[0]


def count_kernels(run: Callable[[int], torch.Tensor]) -> int | None:
    """Count the kernels that a layer's call puts into a CUDA graph; None where nobody can say."""
    try:
        from cuda.bindings import runtime

        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            run(0)
        _, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
        _, nodes, _ = runtime.cudaGraphGetNodes(graph.raw_cuda_graph(), count)
        types = [runtime.cudaGraphNodeGetType(node)[1] for node in nodes]
        return types.count(runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel)
    except Exception:  # of torch or the bindings: no count is no reason to lose a time
        return None
