"""Tables of engines: time per token, first tokens, host time, outputs."""

from __future__ import annotations

from eval.pages.results import gpu_of, load, page_table, place, rows, span

SHAPES = ("models_qwen3-8b", "models_qwen2.5-7b", "models_glm4.5-air_tp8",
          "models_llama3.1-70b_tp8", "models_qwen3-30b-a3b_tp4")  # fmt: skip
ENGINES = ("engine_h100_sglang_0.5.17", "engine_h200_sglang_0.5.17", "engine_h200_sglang_0.5.23")
# Of other layers, KV and modes, by what the page calls them.
KINDS = {
    "engine_h100_e4m3": "KV of e4m3", "engine_h100_e4m3_unshared": "KV of e4m3",
    "engine_h200_e4m3_bf16": "KV of e4m3, over our own bf16",
    "engine_h200_qwen3.5_e4m3": "linear layers, KV of e4m3",
    "engine_h200_qwen3.5": "linear layers", "engine_h200_gpt-oss": "windows, sinks",
    "engine_h200_deepseek-v3": "latent KV",
    "engine_h100_latent": "latent KV", "engine_h100_deepseek-v3": "latent KV",
    "engine_h100_kimi-k2": "latent KV",
    "engine_h100_qwen3.5": "linear layers", "engine_h100_qwen3-next": "linear layers",
    "engine_h100_nemotron-h": "Mamba 2",
    "engine_h100_gpt-oss": "windows, sinks", "engine_h100_gpt-oss_unshared": "windows, sinks",
    "engine_h100_gemma3": "windows",
    "engine_h100_deterministic": "deterministic",
}  # fmt: skip
DRAFT_MODEL = "speculative_standalone_h100"
SPECULATIVE = ("speculative_h100", "speculative_border_h100", "speculative_unshared_h100",
               DRAFT_MODEL, "speculative_h200")  # fmt: skip
FIRST_TOKENS = ("ttft_h100", "ttft_h200", "ttft_unshared_h100", "ttft_deterministic_h200")
# Of each, the fault that was planted.
LAYERS = {
    "layers_h100": "none", "layers_h100_swap_tails": "two tails swapped",
    "layers_h100_skip_append": "a token not appended", "layers_h100_drop_node": "a node left out",
}  # fmt: skip
# On a GPU, in bfloat16: file -> model, and the fault that was planted.
LOGPROBS = {
    "logprobs_h100": "seeded Llama", "logprobs_h200_smollm2": "SmolLM2 135M",
    "logprobs_h200_smollm2_drop_node": "the same, a node left out",
    "logprobs_h200_gemma3-270m": "Gemma 3 270M",
    "logprobs_h200_gemma3-270m_drop_node": "the same, a node left out",
}  # fmt: skip
# Of released checkpoints on a CPU: file -> model, planted fault.
REAL_TEXT = {
    f"logprobs_{model}_{fault}": (title, planted)
    for model, title in (("smollm2", "SmolLM2 135M"), ("gemma3-270m", "Gemma 3 270M"))
    for fault, planted in (
        ("cpu", "-"), ("skip_append", "the newest token left out"),
        ("drop_node", "a node left out"), ("swap_tails", "two tails swapped"),
    )
}  # fmt: skip


@page_table(
    "model shape | GPU | requests | shared + own | FlashInfer, ms | prefix, ms | ratio",
    *ENGINES, *SHAPES,
)  # fmt: skip
def token_times():
    """TPOT of FlashInfer's engine and of one with our decode, prefill by FlashInfer in both."""
    for name in (*ENGINES, *SHAPES):
        stock = {row["workload"]: row for row in rows(name) if row["backend"] == "flashinfer"}
        for row in rows(name):
            if row["backend"] == "flashinfer":
                continue
            prompt = f"{row['shared']} + {row['private']}"
            times = (f"{r['tpot_ms']:.2f}" for r in (stock[row["workload"]], row))
            yield (load(name)["meta"]["model_shape"], place(name), row["batch"], prompt,
                   *times, f"{row['ratio']:.3f}")  # fmt: skip


@page_table(
    "model shape | GPU | kind | requests | beside, ms | prefix, ms | ratio (of turns)", *KINDS
)
def kinds():
    """TPOT of engines over other layers and KV, and deterministic ones, and each turn's ratio."""
    for name, kind in KINDS.items():
        baseline = load(name)["meta"]["baseline"]
        for own in rows(name):
            if "prefix" not in own["backend"] or own["backend"] == baseline:
                continue
            beside = ", ".join(
                f"`{row['backend']}` {row['tpot_ms']:.2f}"
                for row in rows(name)
                if row["workload"] == own["workload"] and row["backend"] != own["backend"]
            )
            each = zip(own["each_tpot_ms"], own["baseline_each_tpot_ms"], strict=True)
            turns = [one / other for one, other in each]
            ratio = f"{own['ratio']:.3f} ({span(turns, '.3f')})"
            yield (load(name)["meta"]["model_shape"], gpu_of(name), kind, f"`{own['workload']}`",
                   beside, f"{own['tpot_ms']:.2f}", ratio)  # fmt: skip


@page_table(
    "GPU | requests | shared + own | stock, ms | plans, ms | ratio | verified over plans",
    *SPECULATIVE,
)
def speculative():
    """TPOT where chains of drafts are verified, and the share of steps over plans."""
    for name in SPECULATIVE:
        stock, own = rows(name)
        steps = own["verify_steps"]
        planned = sum(n for reason, n in steps.items() if reason.startswith("prefix"))
        drafts = ", a draft model" if name == DRAFT_MODEL else ""
        times = (f"`{row['backend']}` {row['tpot_ms']:.2f}" for row in (stock, own))
        yield (place(name) + drafts, own["batch"], f"{own['shared']} + {own['private']}", *times,
               f"{own['ratio']:.3f}", f"{planned} of {sum(steps.values())}")  # fmt: skip


@page_table(
    "GPU | requests | in groups of | FlashAttention 3, ms | plans, ms | ratios", *FIRST_TOKENS
)
def first_tokens():
    """Time to the first tokens of a batch, packed prefill over FlashAttention 3's; in
    deterministic inference beside a server without plans."""
    for name in FIRST_TOKENS:
        fa3, prefix = dict.fromkeys(row["backend"] for row in rows(name))
        own = [row for row in rows(name) if row["backend"] == prefix]
        stock = [row["ttft_ms"] for row in rows(name) if row["backend"] == fa3]
        groups = ", ".join(str(row["group"]) for row in own)
        times = (span(found, ".0f") for found in (stock, [row["ttft_ms"] for row in own]))
        ratios = ", ".join(f"{row['ratio']:.3f}" for row in own)
        mode = ", deterministic" if "deterministic" in name else ""
        yield (place(name) + mode, own[0]["requests"], groups, *times, ratios)


@page_table("GPU's host | file | steady step, us | new plan, ms")
def host_time():
    """Host time of steady steps in engines, and the mean of all new plans up to the last row."""
    for name in ("engine_h100_sglang_0.5.17", "engine_h200_sglang_0.5.23", "engine_pdl_h200"):
        hosts = [row["host"] for row in rows(name) if row["host"] and row["host"]["steady_us"]]
        steady = span([host["steady_us"] for host in hosts], ".0f")
        yield place(name), f"`{name}.json`", steady, f"{hosts[-1]['plan_ms_mean']:.2f}"


@page_table("backend | planted fault | relative error | low-precision torch's", *LAYERS)
def outputs():
    """Errors of attention in running engines against float64 attention over the same KV."""
    for name, title in LAYERS.items():
        for backend in ("prefix", "flashinfer"):
            found = [row for row in rows(name) if row["backend"] == backend]
            if found:
                errors = (span([row[of]["norm"] for row in found], ".2e")
                          for of in ("error", "error_torch"))  # fmt: skip
                yield (f"`{backend}`", title, *errors)


@page_table(
    "model | load | backend | beside | tokens | mean difference in nats | equal greedy tokens",
    *LOGPROBS,
)
def logprobs():
    """Log-probabilities along the greedy tokens of the engine that each stands beside."""
    titles = {"shared": "one shared prefix", "three_levels": "three levels"}
    for name, model in LOGPROBS.items():
        for row in rows(name):
            yield (model, titles.get(row["scenario"], row["scenario"]), f"`{row['backend']}`",
                   f"`{row['reference']}`", row["tokens"], f"{row['mean']:.3f}",
                   f"{row['equal_greedy']:.3f}")  # fmt: skip


@page_table(
    "model | planted fault | tokens | mean difference in nats | equal greedy tokens", *REAL_TEXT
)
def real_text():
    """Log-probabilities of released checkpoints along torch_native's greedy tokens, of chats and of
    a text, with and without planted faults."""
    for name, (title, planted) in REAL_TEXT.items():
        cells = (
            ", ".join(f"{row[key]:{form}}" for row in rows(name))
            for key, form in (("tokens", "d"), ("mean", ".2g"), ("equal_greedy", ".3f"))
        )
        yield (title, planted, *cells)
