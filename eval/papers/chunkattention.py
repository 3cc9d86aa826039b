"""ChunkAttention's experiments."""

from __future__ import annotations

from eval.papers import batches, derived
from eval.papers.experiment import LLAMA2, Claim, Experiment, runs_of
from eval.papers.figures import between, fact, less_span, ratio_each, ratio_span


def _chunk(shared: int, completion: int, batch: int = 32, prompt: int = 2048) -> str:
    return batches.completing(prompt, shared, completion, batch)


EXPERIMENTS = (
    Experiment(
        "chunkattention-prefixes",
        "ChunkAttention, Table 3, section 4.1",
        (
            Claim(
                "over PagedAttention with copies, 4096 of 4096 shared",
                "6.79",
                between(
                    (_chunk(0, 64, prompt=4096), "flashinfer"),
                    (_chunk(4096, 64, prompt=4096), "prefix"),
                ),
            ),
            Claim(
                "over PagedAttention on shared pages, 4096 of 4096 shared",
                "3.22",
                between(
                    (_chunk(4096, 64, prompt=4096), "flashinfer"),
                    (_chunk(4096, 64, prompt=4096), "prefix"),
                ),
            ),
            Claim(
                "over PagedAttention, nothing of 1024 shared",
                "1.07",
                between(
                    (_chunk(0, 64, prompt=1024), "flashinfer"),
                    (_chunk(0, 64, prompt=1024), "prefix"),
                ),
            ),
            Claim("FlashAttention over ours, all nine", "not compared", ratio_span("fa3")),
        ),
        "FlashInfer stands for PagedAttention. Prompts of which three quarters are shared are left "
        "out. Times are of one step, in the middle of a completion of 64 tokens.",
        runs_of(batches.chunk_prefixes(), LLAMA2),
    ),
    Experiment(
        "chunkattention-completions",
        "ChunkAttention, Figure 3, section 4.1",
        tuple(
            Claim(
                f"over PagedAttention with copies, {n} tokens out",
                paper,
                between((_chunk(0, n), "flashinfer"), (_chunk(2048, n), "prefix")),
            )
            for n, paper in ((512, "3.65"), (2048, "2.33"))
        ),
        "One step halfway in place of the mean of all steps.",
        runs_of(batches.chunk_completions(), LLAMA2),
    ),
    Experiment(
        "chunkattention-batches",
        "ChunkAttention, Figure 4, section 4.1",
        (
            Claim(
                "tokens/s of 96 requests over those of 16",
                "1.45",
                between((_chunk(2048, 64, 16), "prefix"), (_chunk(2048, 64, 96), "prefix"), 6),
            ),
            Claim(
                "the same, FlashInfer",
                "less (drawn)",
                between(
                    (_chunk(2048, 64, 16), "flashinfer"), (_chunk(2048, 64, 96), "flashinfer"), 6
                ),
            ),
            Claim(
                "FlashInfer over ours at 16, 32, 64, 96", "not compared", ratio_each("flashinfer")
            ),
        ),
        "Throughput of one layer's attention, as in the paper.",
        runs_of(batches.chunk_sizes(), LLAMA2),
    ),
    Experiment(
        "chunkattention-memory",
        "ChunkAttention, Table 4, section 4.2",
        (
            Claim(
                "peak KV, GB: vLLM, 16 requests",
                "35.42",
                fact("kv_gb", "copies", "Llama2-7B, peak batch", "{:.2f}".format),
            ),
            Claim(
                "peak KV, GB: ChunkLlama, 11 requests",
                "4.00",
                fact("kv_gb", "shared", "Llama2-7B, peak batch", "{:.2f}".format),
            ),
            Claim(
                "less KV, 4096 shared and 512 out",
                "89 %",
                less_span("copies", ("shared",), field="kv_gb"),
                "counted",
            ),
        ),
        "Counted halfway through all completions, without a run. It is SGLang's radix cache that "
        "holds shared KV once, with or without the plugin. Latencies at 0.4 and 1 requests/s are "
        "not repeated: at such rates an H200 decodes few requests at once.",
        count=derived.memory,
    ),
)
