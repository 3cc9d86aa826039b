"""Who answers: row tiles, and the prefill attention that SGLang would run instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from eval.bench_kernel.candidate import plan_us
from eval.bench_kernel.case import Case
from eval.bench_multi_token.workload import Workload
from sgl_prefix_attn.execute.backends.choice import row_tile_backend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.predict.prefill_time import PrefillTime
from sgl_prefix_attn.predict.startup import default_rates

_WORKSPACE_BYTES = 2 << 30


class Prepared(NamedTuple):
    """run(layer) -> out [Q, Hq, D]; facts: what else the row of the result file says, of ours the
    host time of a plan, and of loading it until its slots are filled on the device."""

    run: Callable[[int], torch.Tensor]
    facts: dict


def prefix(case: Case, workload: Workload) -> Prepared:
    """Row tiles of the planner's choice."""
    backend = row_tile_backend(case.device, case.heads, case.dtype)
    rates = default_rates(case.device, case.heads, case.dtype, case.page_size)
    planner = RowTilePlanner(case.heads, num_sms=backend.num_sms, rates=rates)
    forest = build_forest(workload.tree.paths(), workload.query_lens)
    plan = planner.plan_forest(forest)
    executor = PlanExecutor(backend, Capacity.for_plans(plan))
    rows = torch.arange(plan.batch_size, device=case.device)
    executor.load(plan, case.req_to_token, rows)
    out = torch.full_like(case.q, float("nan"))

    def run(layer: int) -> torch.Tensor:
        k, v = case.k[layer], case.v[layer]
        executor.run(LayerParams(case.q, k, v, case.seq_lens, out, None, case.sm_scale, 0.0))
        return out

    def load() -> None:
        executor.load(plan, case.req_to_token, rows)
        if case.device.type == "cuda":
            torch.cuda.synchronize()

    facts = {
        "predicted_us": plan.predicted_us,
        "plan_us": plan_us(lambda: planner.plan_forest(forest), torch.device("cpu")),
        "load_us": plan_us(load, case.device),
        "tiles": plan.stats.num_packs,
        "items": plan.stats.num_items,
        "words": int(plan.words.size),
    }
    return Prepared(run, facts)


def _stock_us(case: Case, workload: Workload) -> float:
    """What the policy of extend batches predicts of stock prefill."""
    unique = build_forest(workload.tree.paths(), workload.query_lens).unique_tokens
    return PrefillTime(case.heads).stock(
        workload.tree.paths().seq_lens, workload.query_lens, unique
    )


def flashinfer(backend: str) -> Callable[[Case, Workload], Prepared]:
    """FlashInfer's paged prefill wrapper, planned as for an eager step."""

    def prepare(case: Case, workload: Workload) -> Prepared:
        import flashinfer

        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=case.device),
            "NHD",
            backend=backend,
        )
        pages = case.pages(case.req_to_token)
        batch, width = pages.shape
        starts = torch.arange(batch + 1, dtype=torch.int32)

        def plan() -> None:
            wrapper.plan(
                starts * workload.tokens,
                starts * width,
                pages.view(-1),
                torch.full((batch,), case.last_page_len(case.tree.seq_len), dtype=torch.int32),
                *case.head_sizes,
                case.page_size,
                causal=True,
                sm_scale=case.sm_scale,
                q_data_type=case.dtype,
                kv_data_type=case.dtype,
            )

        plan()
        outs = case.new_out()

        def run(layer: int) -> torch.Tensor:
            return wrapper.run(case.q, case.kv(layer), out=outs[layer])

        facts = {"predicted_us": _stock_us(case, workload), "plan_us": plan_us(plan, case.device)}
        return Prepared(run, facts)

    return prepare


def fa3(case: Case, workload: Workload) -> Prepared:
    """SGLang's FlashAttention-3 build, called as SGLang's backend does for an extend batch."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    starts = torch.arange(case.tree.batch_size + 1, dtype=torch.int32, device=case.device)
    queries_until, tokens_until = starts * workload.tokens, starts * case.tree.seq_len
    pages = case.pages(case.req_to_token)

    def run(layer: int) -> torch.Tensor:
        return flash_attn_with_kvcache(
            q=case.q,
            k_cache=case.paged(case.k[layer]),
            v_cache=case.paged(case.v[layer]),
            page_table=pages,
            cache_seqlens=case.seq_lens,
            cu_seqlens_q=queries_until,
            cu_seqlens_k_new=tokens_until,
            max_seqlen_q=workload.tokens,
            softmax_scale=case.sm_scale,
            causal=True,
            num_splits=0,
        )

    return Prepared(run, {"predicted_us": _stock_us(case, workload)})


PROVIDERS: dict[str, Callable[[Case, Workload], Prepared]] = {
    "prefix": prefix,
    "flashinfer:fa2": flashinfer("fa2"),
    "flashinfer:fa3": flashinfer("fa3"),
    "fa3": fa3,
}
