"""python -m eval.ablate: the row-tile kernel with one thing changed at a time.

Every ablation of a tree runs the same requests over the same KV, is judged against fp64, and is
timed in turn with the others (CUDA-graph replay over several KV pools, cold L2, median).
`calibrated` is the plan that a server runs on Hopper, launched in order; `dependent_launch` is
launched as a server does, too; `packs` are the Triton kernels.
"""

from __future__ import annotations

import argparse
import sys

import torch

from eval import provenance
from eval.ablate import figure
from eval.ablate.ablations import ABLATIONS, Prepared, Step
from eval.ablate.launches import count_launches
from eval.bench_kernel.case import DTYPES, Case, build_case
from eval.bench_kernel.floor import floor_us, kv_bytes, rates_of
from eval.bench_kernel.oracle import SomeRows
from eval.bench_kernel.trees import parse_trees
from eval.cli_values import gpu, output
from sgl_prefix_attn.calibrate.timing import LayerTimer, medians_us
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.records import HeadConfig

# Long contexts without sharing, as those of asynchronous KV prefetching.
_UNSHARED = ";".join(f"{b}_{n}" for n in (8192, 16384, 32768, 65536) for b in (1, 4, 16, 64))
# Of a case's two pools at least; larger ones are left out.
_MOST_BYTES = 80e9


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.ablate", description=__doc__)
    parser.add_argument(
        "--trees", default="pat20", help="pat20, unshared (8K to 64K), or trees joined by ;"
    )
    parser.add_argument("--heads", default="32/8", help="QO/KV heads, such as 32/8,40/8")
    known = ", ".join(ABLATIONS)
    parser.add_argument("--ablations", default=",".join(ABLATIONS), help=f"of {known}")
    parser.add_argument(
        "--json", type=output, metavar="OUT", help="result file, written after every tree"
    )
    parser.add_argument(
        "--plot", type=output, metavar="OUT.png", help="bars of the means of time / floor"
    )
    args = parser.parse_args(argv)
    names = args.ablations.split(",")
    try:
        if unknown := [name for name in names if name not in ABLATIONS]:
            raise ValueError(f"--ablations: no {', '.join(unknown)}; known are {known}")
        trees = parse_trees(_UNSHARED if args.trees == "unshared" else args.trees)
        all_heads = [HeadConfig(*parse_heads(text), 128) for text in args.heads.split(",")]
        device = gpu()
    except ValueError as error:
        parser.error(str(error))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    rates = rates_of(device)
    meta = provenance.collect("eval.ablate", argv, device=str(device))
    rows: list[dict] = []
    for heads in all_heads:
        for tree in trees:
            if 2 * kv_bytes(tree, heads, 2) > _MOST_BYTES:
                print(f"{tree.name}: left out, its KV does not fit the GPU")
                continue
            case = build_case(tree, heads, 1, DTYPES["bf16"], device, 0)
            floor = floor_us(tree, heads, 2, rates)
            rows += ablate(case, num_sms, names, floor)
            if args.json:
                provenance.save(args.json, meta, rows)
            del case
            torch.cuda.empty_cache()
    print("\n" + "\n".join(_means(rows)))
    if args.plot:
        figure.write(rows, args.plot)
    return 1 if any(row["problem"] for row in rows) else 0


def ablate(case: Case, num_sms: int, names: list[str], floor: float) -> list[dict]:
    """Judge and time ablations of one step; one row each, printed."""
    step = Step.of(case, num_sms)
    judged = SomeRows(case)
    rows, timers = [], []
    for name in names:
        prepared = ABLATIONS[name](step)
        with count_launches() as launches:
            error, problem = judged.judge(prepared.run(0))
        rows.append(_row(case, name, prepared, launches.count, error, problem, floor))
        timers.append(LayerTimer(prepared.run, case.num_layers, case.device, capture=True))
    # each behind itself: a replay behind another kernel's is up to 3 % slower
    twice = [timer for timer in timers for _ in range(2)]
    for row, us in zip(rows, medians_us(twice)[1::2], strict=True):
        row["us"] = us
        print(_line(row), flush=True)
    return rows


def _row(case, name, prepared: Prepared, launches: int, error, problem, floor: float) -> dict:
    heads = case.heads
    return {
        "tree": case.tree.name,
        "heads": f"{heads.num_qo_heads}/{heads.num_kv_heads}",
        "ablation": name,
        "floor_us": floor,
        "us": None,
        "predicted_us": prepared.predicted_us,
        "items": prepared.stats.num_items,
        "kv_tokens": prepared.stats.kv_tokens_read,
        "partial_bytes": prepared.partial_bytes,
        "launches": launches,
        "error": error,
        "problem": problem,
    }


def _line(row: dict) -> str:
    wrong = f"  WRONG: {row['problem']}" if row["problem"] else ""
    said = "" if row["predicted_us"] is None else f" (said {row['predicted_us']:.1f})"
    return (
        f"{row['heads']:5} {row['tree']:45} {row['ablation']:17} {row['us']:8.1f} us  "
        f"x {row['us'] / row['floor_us']:5.2f}  KV {row['kv_tokens']:8}  "
        f"partial {row['partial_bytes'] / 1e6:6.2f} MB  items {row['items']:5}  "
        f"launches {row['launches']}{said}{wrong}"
    )


def _means(rows: list[dict]) -> list[str]:
    """Geometric means of time / floor, and of time over the first ablation's, by heads."""
    lines = []
    for heads in dict.fromkeys(row["heads"] for row in rows):
        mine = [row for row in rows if row["heads"] == heads]
        base = figure.mean_over_floor(mine, mine[0]["ablation"])
        for name in dict.fromkeys(row["ablation"] for row in mine):
            mean = figure.mean_over_floor(mine, name)
            count = sum(row["ablation"] == name for row in mine)
            lines.append(
                f"{heads:5} {name:17} time / floor {mean:6.3f}, {mean / base:6.3f} of "
                f"{mine[0]['ablation']}'s ({count} trees)"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
