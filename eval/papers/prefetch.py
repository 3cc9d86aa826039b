"""The experiments of asynchronous KV cache prefetching."""

from __future__ import annotations

from eval.papers import batches, derived
from eval.papers.experiment import (
    LLAMA2,
    LLAMA3,
    QWEN7,
    QWEN14,
    Claim,
    Experiment,
    runs_of,
)
from eval.papers.figures import bandwidth_share, ratio_each, ratio_span

EXPERIMENTS = (
    Experiment(
        "prefetch-outputs",
        "Asynchronous prefetching, Figure 4 (batch x output)",
        (
            Claim(
                "over XFormers (whole engine); here FlashAttention 3 over ours",
                "up to 1.57",
                ratio_span("fa3"),
            ),
            Claim("bandwidth of ours, of the floor's", "not said", bandwidth_share("prefix")),
            Claim("bandwidth of FlashAttention 3", "not said", bandwidth_share("fa3")),
        ),
        "SGLang has no XFormers backend, whose kernel waits for memory in 77 % of its cycles. Ours "
        "loads asynchronously, and L2 prefetch made it slower "
        "([kernel log](kernel-log.md#ablations-of-row-tiles)). Three batch sizes and outputs of "
        "many.",
        runs_of(batches.outputs(), LLAMA3),
    ),
    Experiment(
        "prefetch-models",
        "Asynchronous prefetching, Table 3",
        (
            Claim(
                "speedup over XFormers; here FlashAttention 3 over ours: Llama2-7B, Llama3-8B, "
                "Qwen2.5-14B, -7B",
                "1.84, 1.89, 1.89, 2.15",
                ratio_each("fa3"),
            ),
            Claim(
                "memory throughput before, of an H20's peak", "20 % to 47 %", bandwidth_share("fa3")
            ),
            Claim("memory throughput with prefetch", "64 % to 87 %", bandwidth_share("prefix")),
        ),
        "Hit rates and stalls need hardware counters. 64 requests halfway through 4096 tokens; the "
        "shares are of what a copy reaches.",
        tuple(
            run
            for heads in (LLAMA2, LLAMA3, QWEN14, QWEN7)
            for run in runs_of(batches.sampled(), heads)
        ),
    ),
    Experiment(
        "prefetch-engine",
        "Asynchronous prefetching, Figures 3 and 4 (whole engine)",
        (
            Claim(
                "over FlashAttention 3, Llama3-8B",
                "up to 1.15",
                ratio_span("fa3", ("fa3/prefix",), field="tpot_ms"),
                "0.99 to 1.00",
            ),
        ),
        "Nothing is shared, so steps run FlashInfer; what is seen is the cost of being there.",
        derive=derived.engine,
        source="python -m eval.bench_engine --backends fa3,fa3/prefix --baseline fa3 --workloads "
        "16x0+512,64x0+512,128x0+512 --new-tokens 512,2048 --alternations 1",
    ),
)
