"""Rows of experiments that another benchmark runs, from its result file, or that are counted."""

from __future__ import annotations

import statistics

from eval.bench_kernel.floor import kv_bytes
from eval.bench_serving.rates import OFFLINE
from eval.bench_serving.serving_row import by_run
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.model_heads import parse_heads

# Of a Llama2-7B (32 layers of 32 KV heads of 128) and a Llama-3.1-8B (8 KV heads), per token.
LLAMA2_TOKEN_BYTES, LLAMA3_TOKEN_BYTES = 32 * 32 * 128 * 2 * 2, 32 * 8 * 128 * 2 * 2
# What stands for PAT and its ablations: provider of eval.bench_kernel -> family, name. Only what is
# of one family is compared.
_PATS = {
    "prefix:portable": ("portable", "calibrated"), "prefix:compute": ("portable", "compute"),
    "prefix:naive": ("portable", "naive"), "prefix:cut1": ("a server's", "calibrated"),
    "prefix:tile_64": ("a server's", "tile_64"),
}  # fmt: skip


def ablations(rows: list[dict]) -> list[dict]:
    """Turn rows of eval.bench_kernel that have a counterpart in PAT into times and bytes: KV, and
    partial results, which are written and read again."""
    found = []
    for row in (row for row in rows if row["provider"] in _PATS):
        heads = HeadConfig(*parse_heads(row["heads"]), row["head_dim"])
        family, name = _PATS[row["provider"]]
        facts = {"batch": row["tree"], "heads": f"{row['heads']}, {family}", "provider": name}
        if row["status"] == "ok":
            partials = merge_bytes(row["num_partials"], heads)
            facts["bytes"] = kv_bytes(row["kv_tokens_read"], heads) + 2 * partials
        found.append(facts | {"status": row["status"], "us": row["us"]})
    return found


def serving(rows: list[dict]) -> list[dict]:
    """Turn rows of eval.bench_serving whose answers were streamed into the medians over the starts
    of each server."""
    return [
        {
            "batch": f"{load} at {rate}",
            "provider": backend,
            "status": "ok" if all(r["completed"] == r["sent"] for r in mine) else "not completed",
            "tpot_ms": statistics.median(r["tpot_ms"]["p50"] for r in mine),
            "ttft_ms": statistics.median(r["ttft_ms"]["mean"] for r in mine),
            "planning_share": _planning_share(mine),
        }
        for (load, rate), backends in by_run(rows).items()
        if load in ("agent", "conversation") and rate != OFFLINE
        for backend, mine in backends.items()
    ]


def _planning_share(rows: list[dict]) -> float | None:
    """Return planning per decode step over the time of a step; None without our counters."""
    shares = [
        1e3 * row["planning_s"] / sum(row["steps"].values()) / row["tpot_ms"]["p50"]
        for row in rows
        if row["steps"]
    ]
    return statistics.median(shares) if shares else None


def merge_bytes(num_partials: int, heads: HeadConfig) -> int:
    """Count the bytes of partial results of one layer: half-precision rows, log-sum-exp and scale
    of each query head. They are written once and read once."""
    return num_partials * heads.num_qo_heads * (2 * heads.head_dim + 8)


def memory() -> list[dict]:
    """Count ChunkAttention's Table 4 (section 4.2), its peak batches, and 32 requests with both: KV
    halfway through all completions. Shared prompts are held once."""
    prompt, completion = 4096, 512
    sets = (("peak batch", 16, 11), ("32 requests", 32, 32))
    models = (("Llama2-7B", LLAMA2_TOKEN_BYTES), ("Llama-3.1-8B", LLAMA3_TOKEN_BYTES))
    return [
        {"batch": f"{model}, {name}", "provider": provider, "status": "counted",
         "kv_gb": token_bytes * tokens / 1e9}
        for model, token_bytes in models
        for name, apart, together in sets
        for provider, tokens in (
            ("copies", apart * (prompt + completion // 2)),
            ("shared", prompt + together * (completion // 2)),
        )
    ]  # fmt: skip
