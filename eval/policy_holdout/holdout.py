"""What is held out, and one batch as a server decides it and as it is measured."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_prefix_attn.predict.record import Calibration
from sgl_prefix_attn.step.evaluate import evaluate
from sgl_prefix_attn.step.policy import BatchFacts
from sgl_prefix_attn.tools.calibrate.batches import Batch
from sgl_prefix_attn.tools.named_gpus import Server

# Calibrations draw their batches from these (the command's default is 0, shipped ones included).
CALIBRATION_SEEDS = range(0, 101)


def check_seeds(seeds: list[int], calibration: Calibration) -> None:
    """Raise ValueError for a seed that is named twice or that the calibration has seen."""
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must differ, got {seeds}")
    seen = calibration.origin and calibration.origin.seed
    for seed in seeds:
        if seed in CALIBRATION_SEEDS or seed == seen:
            raise ValueError(
                f"seed {seed} is not held out: {CALIBRATION_SEEDS[0]} to {CALIBRATION_SEEDS[-1]} "
                f"are for calibrations, and this one was made with seed {seen}"
            )


def judged(batch: Batch, servers: Mapping[str, Server], meter) -> list[dict]:
    """Return for the server of each fallback the facts of a batch, lengths in KV tokens, what it
    decides about it, and microseconds per layer by a BatchMeter of these fallbacks; None and the
    error where that fails.

    stock_us, prefix_us        of its fallback and of its plan
    best_stock_us, fastest_us  of the fastest fallback, and of whatever is fastest
    """
    # As a server's first step: nothing ran before, and the batch fills its graph.
    evaluated = [
        evaluate(batch.paths, BatchFacts(), server.planner, server.predictor)
        for server in servers.values()
    ]
    facts = {
        "name": batch.name, "batch_size": batch.size,
        "mean_len": float(batch.paths.seq_lens.mean()), "tokens": batch.tokens,
        "unique": batch.unique_tokens, "error": None,
    }  # fmt: skip
    stock_us = prefix_us = [None] * len(servers)
    plans = {plan.words.tobytes(): plan for plan, _ in evaluated}  # equal ones are timed once
    try:
        measured_us, distinct_us = meter.measure(batch, list(plans.values()))
        by_plan = dict(zip(plans, distinct_us, strict=True))
        stock_us, prefix_us = measured_us, [by_plan[plan.words.tobytes()] for plan, _ in evaluated]
        facts |= {"best_stock_us": min(stock_us), "fastest_us": min(stock_us + prefix_us)}
    except Exception as failure:
        facts["error"] = f"{type(failure).__name__}: {failure}"
    rows = []
    for fallback, (_, decision), *us in zip(servers, evaluated, stock_us, prefix_us, strict=True):
        assert decision.predicted is not None, "there is a predictor"
        rows.append({
            "fallback": fallback, **facts, **dict(zip(("stock_us", "prefix_us"), us, strict=True)),
            "predicted_stock_us": decision.predicted.stock_us,
            "predicted_prefix_us": decision.predicted.prefix_us,
            "variant": decision.variant, "reason": decision.reason,
        })  # fmt: skip
    return rows
