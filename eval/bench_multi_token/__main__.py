"""python -m eval.bench_multi_token: attention of several tokens a request, ours and SGLang's.

Workloads are written TREE:TOKENS: each request of the tree asks for its last TOKENS tokens,
causally, as a draft is verified or a chunk is prefilled. Every output is judged against fp64, first
and after it was timed; all are timed in turn by CUDA-graph replay over several KV pools (median,
cold L2).
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

from eval import provenance
from eval.bench_kernel.case import DTYPES, Case
from eval.bench_multi_token.providers import PROVIDERS
from eval.bench_multi_token.workload import Judge, Workload
from eval.cli_values import device, output, several
from sgl_prefix_attn.calibrate.timing import LayerTimer, medians_us
from sgl_prefix_attn.cli.argument_types import count
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.records import HeadConfig

# Verification and extension below a shared prefix, then both without sharing.
WORKLOADS = (
    "1,64_8192,260:4;1,128_6000,8:8;1,128_6000,16:16;1,128_6000,32:32;1,128_6000,120:120;"
    "64_2052:4;128_2056:8;32_2168:120;16_2560:512"
)
_ROUNDS = 3


def bench(workload: Workload, case: Case, names: list[str]) -> list[dict]:
    """One row a provider; a wrong or missing one has a status instead of a time."""
    judges = [Judge(case, workload.tokens, layer) for layer in (0, case.num_layers - 1)]
    rows, timers = [], []
    for name in names:
        row = {
            "workload": workload.name, "heads": f"{case.head_sizes[0]}/{case.head_sizes[1]}",
            "provider": name, "status": "ok", "error_torch": judges[0].error_torch,
        }  # fmt: skip
        rows.append(row)
        try:
            prepared = PROVIDERS[name](case, workload)
            row |= prepared.facts
            problem, row["error"] = judges[0].problem(prepared.run(0))
            if problem is None:
                timer = LayerTimer(prepared.run, case.num_layers, case.device, True)
                timers.append((row, timer))
            else:
                row["status"] = f"wrong: {problem}"
        except Exception as error:  # whatever a third-party kernel raises is a line of the table
            row["status"] = f"failed: {type(error).__name__}: {str(error)[:200]}"
    rounds = [medians_us([timer for _, timer in timers]) for _ in range(_ROUNDS)] if timers else []
    for (row, timer), us in zip(timers, zip(*rounds, strict=True), strict=True):
        row |= {"us": statistics.median(us), "us_rounds": list(us), "timing": timer.kind}
        for out in timer.outs:
            out.fill_(float("nan"))
        timer.replay()
        problem, row["error"] = judges[1].problem(timer.outs[-1])
        if problem is not None:
            row["status"] = f"wrong: timed: {problem}"
            del row["us"], row["us_rounds"]
    return rows


def _lines(rows: list[dict]) -> str:
    """Each row, with what it takes of ours."""
    ours = next((row.get("us") for row in rows if row["provider"] == "prefix"), None)
    lines = [f"{rows[0]['workload']}, {rows[0]['heads']} heads"]
    for row in rows:
        text = row["status"]
        if "us" in row:
            text = f"{row['us']:9.1f} us" + (f"  {row['us'] / ours:5.2f} x" if ours else "")
        if "predicted_us" in row:
            text += f"  (predicted {row['predicted_us']:.1f})"
        lines.append(f"  {row['provider']:15} {text}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_multi_token", description=__doc__)
    parser.add_argument("--workloads", default=WORKLOADS, help="TREE:TOKENS joined by ;")
    parser.add_argument("--heads", type=several(parse_heads), default="32/8", help="such as 64/8")
    parser.add_argument("--head-dim", type=count, default=128)
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="joined by commas")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--device", type=device, default="cuda", help="cpu: small trees only")
    parser.add_argument(
        "--json", type=output, metavar="OUT", help="result file, written after every workload"
    )
    args = parser.parse_args(argv)
    names = args.providers.split(",")
    try:
        workloads = [Workload.parse(text) for text in args.workloads.split(";")]
        if unknown := sorted(set(names) - set(PROVIDERS)):
            raise ValueError(f"provider {unknown[0]!r}: known are {', '.join(PROVIDERS)}")
    except ValueError as error:
        parser.error(str(error))
    meta = provenance.collect("eval.bench_multi_token", argv, device=str(args.device))
    rows: list[dict] = []
    for sizes in args.heads:
        heads = HeadConfig(*sizes, args.head_dim)
        for workload in workloads:
            case = workload.case(heads, DTYPES[args.dtype], args.device)
            found = bench(workload, case, names)
            rows += found
            print(_lines(found), flush=True)
            if args.json:
                provenance.save(args.json, meta, rows)
            del case
            if args.device.type == "cuda":
                torch.cuda.empty_cache()
    return int(any(row["provider"] == "prefix" and row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
