"""Rows of the kernel experiments: every provider judged, then timed in turn."""

from __future__ import annotations

import statistics

import torch

from eval.bench_kernel.floor import Rates
from eval.papers import kernels
from eval.papers.case import Judge, build
from eval.papers.counts import expected_us, floor_us
from eval.papers.experiment import NOT_MEASURED, Run
from sgl_prefix_attn.calibrate.timing import LayerTimer

PROVIDERS = ("prefix", "flashinfer", "fa3")
_ROUNDS = 3


def expect(run: Run, rates: Rates) -> list[dict]:
    """Return the rows of a run as far as they are known before it."""
    return [_row(run, name, rates) | {"status": NOT_MEASURED} for name in PROVIDERS]


def measure(
    run: Run, rates: Rates, dtype: torch.dtype, device: torch.device, names=PROVIDERS
) -> list[dict]:
    """Return a row of each provider; a wrong or missing one has a status instead of a time.

    Outputs are judged first, and after they were timed, over outputs that held NaN.
    """
    case = build(run.batch, run.heads, run.page_size, dtype, device)
    judges = [Judge(case, 0), Judge(case, case.num_layers - 1)]
    rows = [_row(run, name, rates) | {"error_torch": judges[0].error_torch} for name in names]
    ready = []
    for row, provider in zip(rows, kernels.providers(names), strict=True):
        reason = provider.available()
        if reason is not None:
            row["status"] = f"unavailable: {reason}"
            continue
        try:
            runnable = provider.prepare(case)
            row |= getattr(runnable, "facts", {})
            problem, row["error"] = judges[0].problem(runnable.run(0))
            if problem is None:
                timer = LayerTimer(runnable.run, case.num_layers, device, provider.capturable)
                ready.append((row, timer, runnable))
            else:
                row["status"] = f"wrong: {problem}"
        except Exception as error:  # whatever a third-party kernel raises is a line of the table
            row["status"] = f"failed: {type(error).__name__}: {str(error)[:200]}"
    rounds: list[list[float]] = [[] for _ in ready]
    for i in range(_ROUNDS):  # every other one backwards
        for (_, timer, _), times in list(zip(ready, rounds, strict=True))[:: (-1) ** i]:
            times.append(timer.us())
    for (row, timer, runnable), times in zip(ready, rounds, strict=True):
        problem, row["error"] = _replayed(timer, judges[1])
        if problem is not None:
            row["status"] = f"wrong: timed: {problem}"
            continue
        row |= {"us": statistics.median(times), "us_rounds": times, "timing": timer.kind}
        if run.count_launches:
            row["launches"] = kernels.count_kernels(runnable.run)
    return rows


def _replayed(timer: LayerTimer, judge: Judge) -> tuple[str | None, float]:
    for out in timer.outs:
        out.fill_(float("nan"))
    timer.replay()
    return judge.problem(timer.outs[-1])


def _row(run: Run, provider: str, rates: Rates) -> dict:
    batch, heads = run.batch, run.heads
    return {
        "batch": batch.name,
        "heads": f"{heads.num_qo_heads}/{heads.num_kv_heads}",
        "provider": provider,
        "status": "ok",
        "page_size": run.page_size,
        "requests": batch.size,
        "tokens": batch.tokens,
        "unique_tokens": batch.unique_tokens,
        "floor_us": floor_us(batch, heads, rates),
        "expected_us": expected_us(provider, batch, heads),
    }


def free(device: torch.device) -> None:
    """Give back what the last case held."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
