"""Tables of engines: time per token, first tokens, host time, outputs."""

from __future__ import annotations

from eval.markdown import table
from eval.pages.results import load, place, rows, source, span

SHAPES = ("models_qwen3-8b", "models_qwen2.5-7b", "models_glm4.5-air_tp8",
          "models_llama3.1-70b_tp8", "models_qwen3-30b-a3b_tp4")  # fmt: skip
ENGINES = ("engine_h100_sglang_0.5.17", "engine_h200_sglang_0.5.17", "engine_h200_sglang_0.5.23")
# Of other layers, KV and modes, by what the page calls them.
KINDS = {
    "engine_h100_e4m3": "KV of e4m3", "engine_h100_e4m3_unshared": "KV of e4m3",
    "engine_h100_latent": "latent KV",
    "engine_h100_qwen3.5": "linear layers", "engine_h100_qwen3-next": "linear layers",
    "engine_h100_nemotron-h": "Mamba 2",
    "engine_h100_gpt-oss": "windows, sinks", "engine_h100_gpt-oss_unshared": "windows, sinks",
    "engine_h100_deterministic": "deterministic",
}  # fmt: skip
DRAFT_MODEL = "speculative_standalone_h100"
SPECULATIVE = ("speculative_h100", "speculative_border_h100", "speculative_unshared_h100",
               DRAFT_MODEL, "speculative_h200")  # fmt: skip


def token_times() -> str:
    """TPOT of FlashInfer's engine and of one with our decode, prefill by FlashInfer in both."""
    lines = []
    for name in (*ENGINES, *SHAPES):
        stock = {row["workload"]: row for row in rows(name) if row["backend"] == "flashinfer"}
        for row in rows(name):
            if row["backend"] == "flashinfer":
                continue
            prompt = f"{row['shared']} + {row['private']}"
            times = (f"{r['tpot_ms']:.2f}" for r in (stock[row["workload"]], row))
            lines.append((load(name)["meta"]["model_shape"], place(name), row["batch"], prompt,
                          *times, f"{row['ratio']:.3f}"))  # fmt: skip
    columns = ("model shape", "GPU", "requests", "shared + own", "FlashInfer, ms", "prefix, ms",
               "ratio")  # fmt: skip
    return f"{table(columns, lines)}\n\n{source(*ENGINES, *SHAPES)}"


def kinds() -> str:
    """TPOT of engines over other layers and KV, and deterministic ones, and each turn's ratio."""
    lines = []
    for name, kind in KINDS.items():
        for own in rows(name):
            if "prefix" not in own["backend"]:
                continue
            stock = ", ".join(
                f"`{row['backend']}` {row['tpot_ms']:.2f}"
                for row in rows(name)
                if row["workload"] == own["workload"] and "prefix" not in row["backend"]
            )
            turns = [
                one / other
                for one, other in zip(
                    own["each_tpot_ms"], own["baseline_each_tpot_ms"], strict=True
                )
            ]
            lines.append((
                load(name)["meta"]["model_shape"], kind, f"`{own['workload']}`", stock,
                f"{own['tpot_ms']:.2f}", f"{own['ratio']:.3f} ({span(turns, '.3f')})",
            ))  # fmt: skip
    columns = ("model shape", "kind", "requests", "stock, ms", "prefix, ms", "ratio (of turns)")
    return f"{table(columns, lines)}\n\n{source(*KINDS)}"


def speculative() -> str:
    """TPOT where chains of drafts are verified, and the share of steps over plans."""
    lines = []
    for name in SPECULATIVE:
        stock, own = rows(name)
        steps = own["verify_steps"]
        planned = sum(n for reason, n in steps.items() if reason.startswith("prefix"))
        drafts = ", a draft model" if name == DRAFT_MODEL else ""
        lines.append((
            place(name) + drafts, own["batch"], f"{own['shared']} + {own['private']}",
            f"`{stock['backend']}` {stock['tpot_ms']:.2f}", f"`{own['backend']}` "
            f"{own['tpot_ms']:.2f}", f"{own['ratio']:.3f}", f"{planned} of {sum(steps.values())}",
        ))  # fmt: skip
    columns = ("GPU", "requests", "shared + own", "stock, ms", "plans, ms", "ratio",
               "verified over plans")  # fmt: skip
    return f"{table(columns, lines)}\n\n{source(*SPECULATIVE)}"


def first_tokens() -> str:
    """Time to the first tokens of a batch, packed prefill over FlashAttention 3's; in
    deterministic inference beside a server without plans."""
    deterministic = "ttft_deterministic_h200"
    files = ("ttft_h100", "ttft_h200", "ttft_unshared_h100", deterministic)
    lines = []
    for name in files:
        fa3, prefix = dict.fromkeys(row["backend"] for row in rows(name))
        own = [row for row in rows(name) if row["backend"] == prefix]
        stock = [row["ttft_ms"] for row in rows(name) if row["backend"] == fa3]
        groups = ", ".join(str(row["group"]) for row in own)
        times = (span(found, ".0f") for found in (stock, [row["ttft_ms"] for row in own]))
        ratios = ", ".join(f"{row['ratio']:.3f}" for row in own)
        mode = ", deterministic" if name == deterministic else ""
        lines.append((place(name) + mode, own[0]["requests"], groups, *times, ratios))
    columns = ("GPU", "requests", "in groups of", "FlashAttention 3, ms", "plans, ms", "ratios")
    return f"{table(columns, lines)}\n\n{source(*files)}"


def host_time() -> str:
    """Host time of steady steps and new plans in engines."""
    files = ("engine_h100_sglang_0.5.17", "engine_h200_sglang_0.5.23", "engine_pdl_h200")
    lines = []
    for name in files:
        hosts = [row["host"] for row in rows(name) if row["host"] and row["host"]["steady_us"]]
        steady = span([host["steady_us"] for host in hosts], ".0f")
        plans = span([host["plan_ms_mean"] for host in hosts], ".2f")
        lines.append((place(name), f"`{name}.json`", steady, plans))
    return table(("GPU's host", "file", "steady step, us", "new plan, ms"), lines)


def outputs() -> str:
    """Errors of attention in running engines against float64 attention over the same KV."""
    lines = []
    for backend in ("prefix", "flashinfer"):
        found = [row for row in rows("layers_h100") if row["backend"] == backend]
        errors = (span([row[name]["norm"] for row in found], ".2e")
                  for name in ("error", "error_torch"))  # fmt: skip
        lines.append((f"`{backend}`", "none", *errors))
    faults = {"swap_tails": "two tails swapped", "skip_append": "a token not appended",
              "drop_node": "a node left out"}  # fmt: skip
    for fault, title in faults.items():
        errors = [row["error"]["norm"] for row in rows(f"layers_h100_{fault}")]
        torch = [row["error_torch"]["norm"] for row in rows(f"layers_h100_{fault}")]
        lines.append(("`prefix`", title, span(errors, ".2e"), span(torch, ".2e")))
    columns = ("backend", "planted fault", "relative error", "low-precision torch's")
    names = ("layers_h100", *(f"layers_h100_{fault}" for fault in faults))
    return f"{table(columns, lines)}\n\n{source(*names)}"


def logprobs() -> str:
    """Log-probabilities along the greedy tokens of FlashInfer's engine."""
    titles = {"shared": "one shared prefix", "three_levels": "three levels"}
    lines = [
        (titles[row["scenario"]], f"`{row['backend']}`", row["tokens"], f"{row['mean']:.3f}",
         f"{row['equal_greedy']:.3f}")
        for row in rows("logprobs_h100")
    ]  # fmt: skip
    columns = ("load", "backend", "tokens", "mean difference in nats", "equal greedy tokens")
    return f"{table(columns, lines)}\n\n{source('logprobs_h100')}"


def real_text() -> str:
    """Log-probabilities of released checkpoints along torch_native's greedy tokens, of chats and of
    a text, with and without planted faults."""
    models = {"smollm2": "SmolLM2 135M", "gemma3-270m": "Gemma 3 270M"}
    faults = {"cpu": "-", "skip_append": "the newest token left out",
              "drop_node": "a node left out", "swap_tails": "two tails swapped"}  # fmt: skip
    lines = []
    for model, title in models.items():
        for fault, planted in faults.items():
            found = rows(f"logprobs_{model}_{fault}")
            tokens, means, equal = (
                ", ".join(f"{row[key]:{form}}" for row in found)
                for key, form in (("tokens", "d"), ("mean", ".2g"), ("equal_greedy", ".3f"))
            )
            lines.append((title, planted, tokens, means, equal))
    columns = ("model", "planted fault", "tokens", "mean difference in nats", "equal greedy tokens")
    names = [f"logprobs_{model}_{fault}" for model in models for fault in faults]
    return f"{table(columns, lines)}\n\n{source(*names)}"
