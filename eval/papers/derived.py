"""Rows of the experiments that another benchmark runs, from its result file."""

from __future__ import annotations

import statistics
from collections import defaultdict

from eval.papers.counts import (
    LLAMA2_TOKEN_BYTES,
    LLAMA3_TOKEN_BYTES,
    kv_bytes,
    peak_kv_bytes,
)
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.records import HeadConfig

_HEAD_DIM = 128
# The planners' own plans, and what stands for PAT's ablations.
_PATS = ("calibrated", "compute", "naive", "tile_64", "packs", "packs_serial")


def ablations(rows: list[dict]) -> list[dict]:
    """Turn rows of eval.ablate that have a counterpart in PAT into times and bytes: KV, and partial
    results, which are written and read again."""
    found = []
    for row in (row for row in rows if row["ablation"] in _PATS):
        heads = HeadConfig(*parse_heads(row["heads"]), _HEAD_DIM)
        read = kv_bytes(row["kv_tokens"], heads) + 2 * row["partial_bytes"]
        found.append(
            {
                "batch": row["tree"], "heads": row["heads"], "provider": row["ablation"],
                "status": "ok" if row["problem"] is None else f"wrong: {row['problem']}",
                "us": row["us"] if row["problem"] is None else None, "bytes": read,
            }
        )  # fmt: skip
    return found


def serving(rows: list[dict]) -> list[dict]:
    """Turn rows of eval.bench_serving into the medians over the starts of each server."""
    starts = defaultdict(list)
    for row in rows:
        if row["load"] in ("agent", "conversation"):
            starts[f"{row['load']} at {row['rate']}", row["backend"]].append(row)
    return [
        {
            "batch": load,
            "provider": backend,
            "status": "ok" if all(r["completed"] == r["sent"] for r in mine) else "not completed",
            "tpot_ms": statistics.median(r["tpot_ms"]["p50"] for r in mine),
            "ttft_ms": statistics.median(r["ttft_ms"]["mean"] for r in mine),
            "e2e_ms": statistics.median(r["e2e_ms"]["mean"] for r in mine),
            "planning_share": _planning_share(mine),
        }
        for (load, backend), mine in starts.items()
    ]


def _planning_share(rows: list[dict]) -> float | None:
    """Return planning per decode step over the time of a step; None without our counters."""
    shares = [
        1e3 * row["planning_s"] / sum(row["steps"].values()) / row["tpot_ms"]["p50"]
        for row in rows
        if row["steps"]
    ]
    return statistics.median(shares) if shares else None


def engine(rows: list[dict]) -> list[dict]:
    """Turn rows of eval.bench_engine into times per token."""
    return [
        {"batch": row["workload"], "provider": row["backend"], "status": "ok",
         "tpot_ms": row["tpot_ms"]}
        for row in rows
    ]  # fmt: skip


def memory() -> list[dict]:
    """Count ChunkAttention's Table 4 (section 4.2): its peak batches, and 32 requests with both."""
    prompt, completion = 4096, 512
    sets = (("peak batch", 16, 11), ("32 requests", 32, 32))
    models = (("Llama2-7B", LLAMA2_TOKEN_BYTES), ("Llama-3.1-8B", LLAMA3_TOKEN_BYTES))
    return [
        {
            "batch": f"{model}, {name}",
            "provider": provider,
            "status": "counted",
            "kv_gb": peak_kv_bytes(prompt, shared, completion, batch, token_bytes) / 1e9,
        }
        for model, token_bytes in models
        for name, apart, together in sets
        for provider, shared, batch in (("copies", 0, apart), ("shared", prompt, together))
    ]
