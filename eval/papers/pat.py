"""PAT's experiments."""

from __future__ import annotations

from eval.papers import batches, derived
from eval.papers.experiment import (
    LLAMA2,
    LLAMA3,
    NARROW,
    WIDE,
    Claim,
    Experiment,
    runs_of,
)
from eval.papers.figures import (
    fact,
    is_unshared,
    less_mean,
    less_span,
    more_mean,
    ratio_mean,
    ratio_most,
    shares,
)

# Trees that other heads are measured on: flat, two and three levels, nothing shared.
_FEW = ("1,256_256,32", "1,2,64_1024,256,256", "1,4,16,512_1024,256,128,32", "256_1024")
_STOCK = ("flashinfer", "fa3")

EXPERIMENTS = (
    Experiment(
        "pat-kernels",
        "PAT, Figure 9, section 8.3",
        (
            Claim(
                "largest speedup over FlashAttention, trees that share",
                "22.7",
                ratio_most("fa3", only=shares),
            ),
            Claim(
                "largest speedup over FlashInfer, trees that share",
                "12.0",
                ratio_most("flashinfer", only=shares),
            ),
            Claim(
                "less latency than both, trees that share",
                "12.3 % to 95.6 %",
                less_span(_STOCK, only=shares),
            ),
            Claim("less latency on average (abstract)", "67.4 %", less_mean(_STOCK)),
            *(
                Claim(f"{name}'s time over ours, geometric mean", "not said", ratio_mean(provider))
                for name, provider in (("FlashInfer", "flashinfer"), ("FlashAttention", "fa3"))
            ),
            Claim(
                "less latency than both, nothing shared",
                "1.4 % to 21.2 %",
                less_span(_STOCK, only=is_unshared),
            ),
        ),
        "FastTree's and PAT's own kernels run in `eval.bench_kernel`, RelayAttention has no build "
        "for SGLang. 64/8, 16/8 and 32/32 heads run 4 of the 20 trees, so that all ends in time. "
        "bf16 stands for fp16 everywhere: as many bytes.",
        (
            *runs_of(batches.pat(), LLAMA3),
            *(
                run
                for heads in (LLAMA2, WIDE, NARROW)
                for run in runs_of(batches.trees(*_FEW), heads)
            ),
        ),
    ),
    Experiment(
        "pat-ablations",
        "PAT, Figure 11, section 8.5",
        (
            Claim(
                "(a) PAT-compute, more latency",
                "4.6 %",
                more_mean("compute", ("calibrated",)),
                "29 %",
            ),
            Claim(
                "(a) PAT-naive, more latency", "10.4 %", more_mean("naive", ("calibrated",)), "37 %"
            ),
            Claim(
                "(a) PAT-fixed, more latency: tiles of 64 rows",
                "39 %",
                more_mean("tile_64", ("calibrated",)),
                "4 %",
            ),
            Claim(
                "(a) PAT-serial, more latency: of packs",
                "4.8 %",
                more_mean("packs_serial", ("packs",)),
                "9 %",
            ),
            Claim(
                "(b) PAT-compute, more bytes",
                "10.9 %",
                more_mean("compute", ("calibrated",), field="bytes"),
                "counted",
            ),
            Claim(
                "(b) PAT-naive, more bytes",
                "16.7 %",
                more_mean("naive", ("calibrated",), field="bytes"),
                "counted",
            ),
        ),
        "Strategies are compared as items of row tiles. One persistent kernel has no streams to "
        "serialise, so PAT-serial is that of packs. Bytes are counted; the paper profiles them.",
        derive=derived.ablations,
        source="python -m eval.ablate",
    ),
    Experiment(
        "pat-traces",
        "PAT, Figures 10 and 13, section 8.4",
        (
            Claim(
                "less TPOT than FlashAttention",
                "13.6 % to 73.9 %",
                less_span("default", field="tpot_ms"),
                "12 % to 13 %",
            ),
            Claim(
                "less TPOT than FlashInfer",
                "31.6 % to 83.4 %",
                less_span("flashinfer", field="tpot_ms"),
                "12 % to 13 %",
            ),
            Claim(
                "less TTFT than FlashAttention",
                "7.9 % to 99.6 %",
                less_span("default", field="ttft_ms"),
                "0 % below saturation",
            ),
        ),
        "The paper plays 30 minutes of both traces; the loads here are some hundred requests with "
        "their lengths ([serving.md](serving.md#loads)). On an H200 attention is less of a step "
        "than on an A100.",
        derive=derived.serving,
        source="python -m eval.bench_serving --backends default,flashinfer,prefix "
        "--loads conversation,agent --rates inf,5,8",
    ),
    Experiment(
        "pat-overhead",
        "PAT, Figure 14, appendix B",
        tuple(
            Claim(
                f"scheduling over preprocessing; here planning over a step's time, {load}",
                paper,
                fact("planning_share", "prefix", load, lambda share: f"{100 * share:.1f} %"),
                "1 % to 3 %",
            )
            for load, paper in (("agent at 70%", "18.4 %"), ("conversation at 70%", "11.2 %"))
        ),
        "SGLang has no counter of its preprocessing: planning is put beside the time of a step, "
        "most of which it overlaps. The paper's rates are 8 and 5 requests/s; here they are 70 % "
        "of what the default serves.",
        derive=derived.serving,
        source="python -m eval.bench_serving --backends default,prefix "
        "--loads agent,conversation --rates inf,70%",
    ),
)
