"""Rows of the kernel experiments: eval.bench_kernel's runner over the papers' batches, by what a
server with the plugin runs and by SGLang's kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eval.bench_kernel.case import Case, build_batch_case
from eval.bench_kernel.floor import Rates, floor_us
from eval.bench_kernel.oracle import Oracle, some_rows
from eval.bench_kernel.providers import make_providers
from eval.bench_kernel.providers.planned import PlannedRunnable
from eval.bench_kernel.turns import take_turns
from eval.papers.derived import merge_bytes
from eval.papers.experiment import Run
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.predictor import Predictor
from sgl_prefix_attn.predict.startup import gpu_key
from sgl_prefix_attn.step.evaluate import evaluate
from sgl_prefix_attn.step.policy import BatchFacts

PROVIDERS = ("prefix", "flashinfer", "fa3")


def measure(
    run: Run, rates: Rates, dtype: torch.dtype, device: torch.device, names=PROVIDERS
) -> list[dict]:
    """Return a row of each provider; a wrong or missing one has a status instead of a time.

    `prefix` is what a server runs; its row has the family of kernels, server_runs, what the policy
    gives such a batch ("prefix" without a calibration, on a CPU), and merge_bytes of partial
    results, written and read again.
    """
    batch = run.batch
    case = build_batch_case(
        batch.paths, batch.unique_tokens, run.heads, run.page_size, dtype, device
    )

    def facts(runnable) -> dict:
        found = {"launches": count_kernels(runnable.run)} if run.count_launches else {}
        if isinstance(runnable, PlannedRunnable):
            found["server_runs"] = _server_runs(case, runnable)
            found["merge_bytes"] = merge_bytes(runnable.stats.num_partials, case.heads)
        return found

    of_case = case, Oracle(case, some_rows(case))
    return take_turns(
        make_providers(names), lambda p: row(run, p.name, rates), lambda p: of_case, device, facts
    )


def row(run: Run, provider: str, rates: Rates) -> dict:
    """Return a row as far as it is known before the run."""
    batch, heads = run.batch, run.heads
    return {
        "batch": batch.name, "heads": f"{heads.num_qo_heads}/{heads.num_kv_heads}",
        "provider": provider, "status": "ok", "page_size": run.page_size, "requests": batch.size,
        "tokens": batch.tokens, "unique_tokens": batch.unique_tokens,
        "floor_us": floor_us(batch, heads, rates),
    }  # fmt: skip


def _server_runs(case: Case, made: PlannedRunnable) -> str:
    """Return the variant of a server's decision on the case's batch."""
    predictor = None
    if case.device.type == "cuda":
        key = gpu_key(made.family, case.device, case.heads, case.dtype, case.page_size)
        num_sms = torch.cuda.get_device_properties(case.device).multi_processor_count
        predictor = Predictor(store.find(key, num_sms).calibration)
    return evaluate(case.paths, BatchFacts(), made.planner, predictor).decision.variant


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
