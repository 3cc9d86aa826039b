"""The experiments of the papers by name: what is run, the papers' numbers, and ours beside them."""

# The tables are wider than one argument a line.
# fmt: off

from __future__ import annotations

from eval.bench_kernel.trees import PAT20
from eval.papers import batches, derived
from eval.papers import figures as f
from eval.papers.batches import completing, trees
from eval.papers.experiment import (
    LLAMA2,
    LLAMA3,
    NARROW,
    QWEN7,
    QWEN14,
    WIDE,
    Claim,
    Experiment,
    runs_of,
)

# Trees that other heads are measured on: flat, two and three levels, nothing shared.
_FEW = ("1,256_256,32", "1,2,64_1024,256,256", "1,4,16,512_1024,256,128,32", "256_1024")
_STOCK = ("flashinfer", "fa3")
_OURS = ("calibrated",)
_THEIRS = "1.58, 1.00, 1.30, 1.05, 1.16"
_4096 = completing(4096, prompt=4096)

_ALL = (
    Experiment(
        "pat-kernels", "PAT, Figure 9, section 8.3",
        (
            Claim("largest speedup over FlashAttention, trees that share", "22.7",
                  f.ratio_most("fa3", only=f.shares), "18.7"),
            Claim("largest speedup over FlashInfer, trees that share", "12.0",
                  f.ratio_most("flashinfer", only=f.shares), "18.7"),
            Claim("less latency than both, trees that share", "12.3 % to 95.6 %",
                  f.less_span(_STOCK, only=f.shares), "49.6 % to 94.7 %"),
            Claim("less latency on average (abstract)", "67.4 %", f.less_mean(_STOCK), "66.0 %"),
            Claim("FlashInfer's time over ours, geometric mean", "not said",
                  f.ratio_mean("flashinfer"), "4.01"),
            Claim("FlashAttention's time over ours, geometric mean", "not said",
                  f.ratio_mean("fa3"), "4.01"),
            Claim("less latency than both, nothing shared", "1.4 % to 21.2 %",
                  f.less_span(_STOCK, only=f.is_unshared), "2.9 % to 10.4 %"),
        ),
        "FastTree's and PAT's own kernels run in `eval.bench_kernel`, RelayAttention has no build "
        "for SGLang. 64/8, 16/8 and 32/32 heads run 4 of the 20 trees, so that all ends in time. "
        "bf16 stands for fp16 everywhere: as many bytes.",
        (
            *runs_of(trees(*PAT20), LLAMA3),
            *runs_of(trees(*_FEW), LLAMA2, WIDE, NARROW),
        ),
    ),
    Experiment(
        "pat-ablations", "PAT, Figure 11, section 8.5",
        (
            Claim("(a) PAT-compute, more latency", "4.6 %", f.more_mean("compute", _OURS), "29 %"),
            Claim("(a) PAT-naive, more latency", "10.4 %", f.more_mean("naive", _OURS), "37 %"),
            Claim("(a) PAT-fixed, more latency: tiles of 64 rows", "39 %",
                  f.more_mean("tile_64", _OURS), "4 %"),
            Claim("(b) PAT-compute, more bytes", "10.9 %",
                  f.more_mean("compute", _OURS, field="bytes"), "counted", counted=True),
            Claim("(b) PAT-naive, more bytes", "16.7 %",
                  f.more_mean("naive", _OURS, field="bytes"), "counted", counted=True),
        ),
        "Measured with strategies as items of tiles, merged by another launch; the command now "
        "compares those of the portable kernel. There is no PAT-serial: one persistent kernel has "
        "no streams to serialise. Bytes are counted; the paper profiles them.",
        derive=derived.ablations, source="python -m eval.bench_kernel --providers "
        "prefix:portable,prefix:compute,prefix:naive,prefix:cut1,prefix:tile_64",
    ),
    Experiment(
        "pat-traces", "PAT, Figures 10 and 13, section 8.4",
        (
            Claim("less TPOT than FlashAttention", "13.6 % to 73.9 %",
                  f.less_span("default", field="tpot_ms"), "12 % to 13 %"),
            Claim("less TPOT than FlashInfer", "31.6 % to 83.4 %",
                  f.less_span("flashinfer", field="tpot_ms"), "12 % to 13 %"),
            Claim("less TTFT than FlashAttention", "7.9 % to 99.6 %",
                  f.less_span("default", field="ttft_ms"), "0 % below saturation"),
        ),
        "The paper plays 30 minutes of both traces; the loads here are some hundred requests with "
        "their lengths ([the loads](servers.md#loads)). On an H200 attention is less of a step "
        "than on an A100.",
        derive=derived.serving,
        source="python -m eval.bench_serving --backends default,flashinfer,prefix "
        "--loads conversation,agent --azure-trace CSV",
    ),
    Experiment(
        "pat-overhead", "PAT, Figure 14, appendix B",
        tuple(
            Claim(f"scheduling over preprocessing; here planning over a step's time, {load}", paper,
                  f.fact("planning_share", "prefix", load, lambda share: f"{100 * share:.1f} %"),
                  "1 % to 3 %")
            for load, paper in (("agent at 70%", "18.4 %"), ("conversation at 70%", "11.2 %"))
        ),
        "SGLang has no counter of its preprocessing: planning is put beside the time of a step, "
        "most of which it overlaps. The paper's rates are 8 and 5 requests/s; here they are 70 % "
        "of what the default serves.",
        derive=derived.serving,
        source="python -m eval.bench_serving --backends default,prefix "
        "--loads agent,conversation --rates inf,70% --azure-trace CSV",
    ),
    Experiment(
        "packinfer-loads", "PackInfer, Figures 1, 6 and 10, sections 2.2 and 4",
        (
            Claim("less time between tokens than FlashAttention (whole engine)",
                  "13.0 % to 20.1 %", f.less_span("fa3"), "26.8 % to 72.8 %"),
            Claim("FlashInfer over ours, by load", "not compared", f.ratio_each("flashinfer"),
                  "2.43, 2.43, 1.37, 1.37, 1.62, 1.62, 3.68, 3.68"),
            *(
                Claim(f"lengths of LMSYS over one length, 256 requests, {name}", "more (drawn)",
                      f.between(("lmsys 256", name), ("lmsys 256 even", name)), "1.0 to 1.2")
                for name in ("prefix", *_STOCK)
            ),
        ),
        "Attention alone; the paper times an engine, in which it is a part. Lengths are drawn with "
        "published means. SM occupancy (Table 3) needs hardware counters. There are no groups here "
        "whose size could be varied (Figure 10).",
        runs_of(batches.mixes(), LLAMA3),
    ),
    Experiment(
        "persistentkv-single", "PersistentKV, Table 1, section 4.2",
        (
            Claim("FlashInfer's time over theirs at 8K, 32K, 64K tokens", "0.75, 0.71, 0.73",
                  f.ratio_each("flashinfer"), "1.01, 1.00, 1.00"),
            Claim("FlashAttention's over ours", "not compared", f.ratio_each("fa3"),
                  "1.01, 1.00, 1.00"),
        ),
        "An RTX 3060 has 28 SMs and 0.3 TB/s, an H200 132 and 4.2: there a request of 8K tokens is "
        "mostly fixed time. SGLang has no kernels of vLLM or TensorRT-LLM.",
        runs_of(trees("1_8192", "1_32768", "1_65536"), LLAMA3, page_size=16),
    ),
    Experiment(
        "persistentkv-active", "PersistentKV, Tables 2 and 3, section 4.3",
        (
            Claim("FlashInfer's time over theirs: bucketed 1, bimodal 4 and 8, uniform 8, Zipf 8; "
                  "here homogeneous 4 and 8, too", _THEIRS, f.ratio_each("flashinfer"),
                  "1.00, 1.01, 1.01, 1.01, 1.01, 1.00, 1.00"),
            Claim("the same of what the policy picks", _THEIRS, f.policy_each(),
                  "1.00 each: FlashInfer runs"),
            Claim("launches of a step, bimodal 8", "2",
                  f.fact("launches", "prefix", "bimodal 8"), "1"),
            Claim("launches of FlashInfer, bimodal 8", "1",
                  f.fact("launches", "flashinfer", "bimodal 8"), "2: KV is split"),
            Claim("MB of partial results, bimodal 8", "2.54",
                  f.fact("merge_bytes", "prefix", "bimodal 8", lambda n: f"{n / 1e6:.2f}"), "1.08",
                  counted=True),
        ),
        "Single steps; the paper runs traces, whose lengths it gives for two families only. Its "
        "gains are over a FlashInfer that left 28 SMs partly idle. Wall time per step is the "
        "engine's (`eval.bench_engine`).",
        runs_of(batches.active_sets(), LLAMA3, page_size=16, count_launches=True),
    ),
    Experiment(
        "chunkattention-prefixes", "ChunkAttention, Table 3, section 4.1",
        (
            Claim("over PagedAttention with copies, 4096 of 4096 shared", "6.79",
                  f.between((completing(0, prompt=4096), "flashinfer"), (_4096, "prefix")),
                  "17.65"),
            Claim("over PagedAttention on shared pages, 4096 of 4096 shared", "3.22",
                  f.between((_4096, "flashinfer"), (_4096, "prefix")), "10.09"),
            Claim("over PagedAttention, nothing of 1024 shared", "1.07",
                  f.between((completing(0, prompt=1024), "flashinfer"),
                            (completing(0, prompt=1024), "prefix")), "1.03"),
            Claim("FlashAttention over ours, all nine", "not compared", f.ratio_span("fa3"),
                  "1.01 to 10.09"),
        ),
        "FlashInfer stands for PagedAttention. Prompts of which three quarters are shared are left "
        "out. Times are of one step, in the middle of a completion of 64 tokens.",
        runs_of(trees(*(completing(n * part // 2, prompt=n) for n in (1024, 2048, 4096)
                        for part in range(3))), LLAMA2),
    ),
    Experiment(
        "chunkattention-completions", "ChunkAttention, Figure 3, section 4.1",
        tuple(
            Claim(f"over PagedAttention with copies, {n} tokens out", paper,
                  f.between((completing(0, n), "flashinfer"), (completing(2048, n), "prefix")),
                  expected)
            for n, paper, expected in ((512, "3.65", "6.04"), (2048, "2.33", "2.72"))
        ),
        "One step halfway in place of the mean of all steps.",
        runs_of(trees(*(completing(part, n) for n in (512, 2048) for part in (2048, 0))), LLAMA2),
    ),
    Experiment(
        "chunkattention-batches", "ChunkAttention, Figure 4, section 4.1",
        (
            *(
                Claim(says, paper, f.between((completing(2048, batch=16), name),
                                             (completing(2048, batch=96), name), 6), expected)
                for says, paper, name, expected in (
                    ("tokens/s of 96 requests over those of 16", "1.45", "prefix", "4.00"),
                    ("the same, FlashInfer", "less (drawn)", "flashinfer", "1.11"),
                )
            ),
            Claim("FlashInfer over ours at 16, 32, 64, 96", "not compared",
                  f.ratio_each("flashinfer"), "4.23, 7.24, 11.87, 15.27"),
        ),
        "Throughput of one layer's attention, as in the paper.",
        runs_of(trees(*(completing(2048, batch=batch) for batch in (16, 32, 64, 96))), LLAMA2),
    ),
    Experiment(
        "chunkattention-memory", "ChunkAttention, Table 4, section 4.2",
        (
            *(
                Claim(f"peak KV, GB: {whose}", paper,
                      f.fact("kv_gb", kind, "Llama2-7B, peak batch", "{:.2f}".format), expected,
                      counted=True)
                for whose, paper, kind, expected in (
                    ("vLLM, 16 requests", "35.42", "copies", "36.51"),
                    ("ChunkLlama, 11 requests", "4.00", "shared", "3.62"),
                )
            ),
            Claim("less KV, 4096 shared and 512 out", "89 %",
                  f.less_span("copies", ("shared",), field="kv_gb"), "counted", counted=True),
        ),
        "Counted halfway through all completions, without a run. It is SGLang's radix cache that "
        "holds shared KV once, with or without the plugin. Latencies at 0.4 and 1 requests/s are "
        "not repeated: at such rates an H200 decodes few requests at once.",
        count=derived.memory,
    ),
    Experiment(
        "prefetch-outputs", "Asynchronous prefetching, Figure 4 (batch x output)",
        (
            Claim("over XFormers (whole engine); here FlashAttention 3 over ours", "up to 1.57",
                  f.ratio_span("fa3"), "1.01 to 1.15"),
            Claim("bandwidth of ours, of the floor's", "not said", f.bandwidth_share("prefix"),
                  "7 % to 98 %"),
            Claim("bandwidth of FlashAttention 3", "not said", f.bandwidth_share("fa3"),
                  "7 % to 96 %"),
        ),
        "SGLang has no XFormers backend, whose kernel waits for memory in 77 % of its cycles. Ours "
        "loads asynchronously, and L2 prefetch made it slower "
        "([kernel log](../../docs/kernel-log.md#ablations)). Three batch sizes and outputs of "
        "many.",
        runs_of(trees(*(completing(0, n, batch, 512) for n in (512, 2048, 8192)
                        for batch in (1, 16, 128))), LLAMA3),
    ),
    Experiment(
        "prefetch-models", "Asynchronous prefetching, Table 3",
        (
            Claim("speedup over XFormers; here FlashAttention 3 over ours: Llama2-7B, Llama3-8B, "
                  "Qwen2.5-14B, -7B", "1.84, 1.89, 1.89, 2.15", f.ratio_each("fa3"),
                  "1.01, 1.05, 1.05, 1.09"),
            Claim("memory throughput before, of an H20's peak", "20 % to 47 %",
                  f.bandwidth_share("fa3"), "82 % to 97 %"),
            Claim("memory throughput with prefetch", "64 % to 87 %", f.bandwidth_share("prefix"),
                  "89 % to 98 %"),
        ),
        "Hit rates and stalls need hardware counters. 64 requests halfway through 4096 tokens; the "
        "shares are of what a copy reaches.",
        runs_of(trees(completing(0, 4096, 64, 512)), LLAMA2, LLAMA3, QWEN14, QWEN7),
    ),
)

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}
KERNELS = "kernels"  # names all that need nothing but a GPU


def find(names: list[str]) -> list[Experiment]:
    """Return the experiments of these names, KERNELS among them, in the papers' order."""
    kernels = KERNELS in names
    return [e for e in _ALL if e.name in names or (kernels and e.derive is None)]
