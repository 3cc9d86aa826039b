"""PackInfer's experiments."""

from __future__ import annotations

from eval.papers import batches
from eval.papers.experiment import LLAMA3, Claim, Experiment, runs_of
from eval.papers.figures import between, less_span, ratio_each

EXPERIMENTS = (
    Experiment(
        "packinfer-loads",
        "PackInfer, Figures 1, 6 and 10, sections 2.2 and 4",
        (
            Claim(
                "less time between tokens than FlashAttention (whole engine)",
                "13.0 % to 20.1 %",
                less_span("fa3"),
            ),
            Claim("FlashInfer over ours, by load", "not compared", ratio_each("flashinfer")),
            *(
                Claim(
                    f"lengths of LMSYS over one length, 256 requests, {provider}",
                    "more (drawn)",
                    between(("lmsys 256", provider), ("lmsys 256 even", provider)),
                    "1.0 to 1.2",
                )
                for provider in ("prefix", "flashinfer", "fa3")
            ),
        ),
        "Attention alone; the paper times an engine, in which it is a part. Lengths are drawn with "
        "published means. SM occupancy (Table 3) needs hardware counters. There are no groups here "
        "whose size could be varied (Figure 10).",
        runs_of(batches.mixes(), LLAMA3),
    ),
)
