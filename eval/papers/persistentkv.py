"""PersistentKV's experiments."""

from __future__ import annotations

from eval.papers import batches
from eval.papers.experiment import LLAMA3, Claim, Experiment, runs_of
from eval.papers.figures import fact, policy_each, ratio_each

EXPERIMENTS = (
    Experiment(
        "persistentkv-single",
        "PersistentKV, Table 1, section 4.2",
        (
            Claim(
                "FlashInfer's time over theirs at 8K, 32K, 64K tokens",
                "0.75, 0.71, 0.73",
                ratio_each("flashinfer"),
            ),
            Claim("FlashAttention's over ours", "not compared", ratio_each("fa3")),
        ),
        "An RTX 3060 has 28 SMs and 0.3 TB/s, an H200 132 and 4.2: there a request of 8K tokens is "
        "mostly fixed time. SGLang has no kernels of vLLM or TensorRT-LLM.",
        runs_of(batches.single(), LLAMA3, page_size=16),
    ),
    Experiment(
        "persistentkv-active",
        "PersistentKV, Tables 2 and 3, section 4.3",
        (
            Claim(
                "FlashInfer's time over theirs: bucketed 1, bimodal 4 and 8, uniform 8, Zipf 8; "
                "here homogeneous 4 and 8, too",
                "1.58, 1.00, 1.30, 1.05, 1.16",
                ratio_each("flashinfer"),
            ),
            Claim(
                "the same of what the policy picks",
                "1.58, 1.00, 1.30, 1.05, 1.16",
                policy_each(),
                "1.00 each: FlashInfer runs",
            ),
            Claim(
                "launches of a step, bimodal 8",
                "2",
                fact("launches", "prefix", "bimodal 8"),
                "1",
            ),
            Claim(
                "launches of FlashInfer, bimodal 8",
                "1",
                fact("launches", "flashinfer", "bimodal 8"),
                "2: KV is split",
            ),
            Claim(
                "MB of partial results, bimodal 8",
                "2.54",
                fact("merge_bytes", "prefix", "bimodal 8", lambda n: f"{n / 1e6:.2f}"),
                "1.08",
            ),
        ),
        "Single steps; the paper runs traces, whose lengths it gives for two families only. Its "
        "gains are over a FlashInfer that left 28 SMs partly idle. Wall time per step is the "
        "engine's (`eval.bench_engine`).",
        runs_of(batches.active_sets(), LLAMA3, page_size=16, count_launches=True),
    ),
)
