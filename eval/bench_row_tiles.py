"""python -m eval.bench_row_tiles: the row-tile kernel on prefix trees, one line a cut.

The cuts that are predicted best are judged against fp64 and timed (CUDA-graph replay over several
KV pools, median); the first of each tree is what the planner would choose. Each has two
times: launched one after the other, and with programmatic dependent launches, which in an engine
need a kernel before attention that allows them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import geometric_mean

import torch

from eval import provenance
from eval.bench_kernel.candidate import plan_us
from eval.bench_kernel.case import DTYPES, Case, build_case
from eval.bench_kernel.floor import floor_us, rates_of
from eval.bench_kernel.oracle import SomeRows
from eval.bench_kernel.trees import LAYOUTS, parse_trees
from eval.cli_values import gpu, output
from sgl_prefix_attn.calibrate.timing import LayerTimer, medians_us
from sgl_prefix_attn.cli.argument_types import count
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tiles import Cut
from sgl_prefix_attn.predict.startup import default_rates
from sgl_prefix_attn.records import HeadConfig


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_row_tiles", description=__doc__)
    parser.add_argument("--trees", default="pat20", help="pat20, or trees joined by ;")
    parser.add_argument("--heads", default="32/8", help="QO/KV heads, such as 32/8,64/8")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16"])
    parser.add_argument("--layout", default="permuted", choices=LAYOUTS, help="of KV in the pool")
    parser.add_argument("--cuts", type=count, default=1, help="predicted best ones to time")
    parser.add_argument("--headroom", type=count, default=256, help="steps a plan may grow")
    parser.add_argument(
        "--json", type=output, metavar="OUT", help="result file, written after every tree"
    )
    args = parser.parse_args(argv)
    try:
        trees = parse_trees(args.trees)
        configurations = [
            (text, HeadConfig(*parse_heads(text), args.head_dim)) for text in args.heads.split(",")
        ]
        device = gpu()
    except ValueError as error:
        parser.error(str(error))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    rates = rates_of(device)
    meta = provenance.collect("eval.bench_row_tiles", argv, device=str(device))
    rows: list[dict] = []
    wrong = 0
    for text, heads in configurations:
        planner = RowTilePlanner(
            heads, num_sms=num_sms, rates=default_rates(device, heads, DTYPES[args.dtype], 1),
            headroom=args.headroom,
        )  # fmt: skip
        mine = []
        for tree in trees:
            floor = floor_us(tree, heads, 2, rates)
            case = build_case(tree, heads, 1, DTYPES[args.dtype], device, 0, args.layout)
            cuts = _bench(case, planner, args.cuts)
            row = {
                "tree": tree.name, "heads": text, "head_dim": args.head_dim, "floor_us": floor,
                **cuts,
            }  # fmt: skip
            mine.append(row)
            print(_line(row), flush=True)
            wrong += sum(cut["problem"] is not None for cut in cuts["cuts"])
            if args.json:
                provenance.save(args.json, meta, rows + mine)
            del case
            torch.cuda.empty_cache()
        rows += mine
        first, pdl = (
            geometric_mean([row["cuts"][0][us] / row["floor_us"] for row in mine])
            for us in ("us", "us_pdl")
        )
        best = geometric_mean([min(c["us"] for c in r["cuts"]) / r["floor_us"] for r in mine])
        print(
            f"{text}: time / floor {first:.3f} by prediction ({pdl:.3f} with dependent launches), "
            f"{best:.3f} with the best cut timed"
        )
    return 1 if wrong else 0


def _bench(case: Case, planner: RowTilePlanner, most: int) -> dict:
    paths = case.tree.paths()
    forest = build_forest(paths)
    planner.plan(paths)
    host_us = plan_us(lambda: planner.plan(paths), torch.device("cpu"))
    cuts = sorted(planner.cuts(forest), key=lambda cut: cut.us)[:most]
    rows = SomeRows(case)
    timed = [_time(case, planner, forest, cut, rows) for cut in cuts]
    return {"plan_us": host_us, "cuts": timed}


def _time(case, planner, forest, cut: Cut, judged: SomeRows) -> dict:
    plan = planner.serialize(forest, cut)
    rows = torch.arange(plan.batch_size, device=case.device)
    out = torch.full_like(case.q, float("nan"))

    def runner(pdl: bool) -> Callable[[int], torch.Tensor]:
        backend = GluonBackend(case.heads, case.dtype, case.device, pdl)
        executor = PlanExecutor(backend, Capacity.for_plans(plan))
        executor.load(plan, case.req_to_token, rows)

        def run(layer: int) -> torch.Tensor:
            k, v = case.k[layer], case.v[layer]
            executor.run(LayerParams(case.q, k, v, case.seq_lens, out, None, case.sm_scale, 0.0))
            return out

        return run

    run = runner(False)
    run(0)
    error, problem = judged.judge(out)
    us, us_pdl = medians_us(
        [LayerTimer(one, case.num_layers, case.device, True) for one in (run, runner(True))]
    )
    return {
        "queries": cut.most_queries,
        "tiles": int(cut.parts.size),
        "parts": int(cut.parts.max()),
        "items": plan.num_items,
        "unmasked": int(cut.tiles.blocks[:, 0].sum()),
        "masked": int(cut.tiles.blocks[:, 1].sum()),
        "predicted_us": cut.us,
        "us": us,
        "us_pdl": us_pdl,
        "error": error,
        "problem": problem,
    }


def _line(row: dict) -> str:
    floor = row["floor_us"]
    cuts = "  ".join(
        f"{c['us']:.1f} / {c['us_pdl']:.1f} "
        f"(q{c['queries']} k{c['parts']}, said {c['predicted_us']:.1f})"
        + ("" if c["problem"] is None else f" WRONG: {c['problem']}")
        for c in row["cuts"]
    )
    first, best = row["cuts"][0]["us"] / floor, min(c["us"] for c in row["cuts"]) / floor
    return (
        f"{row['heads']:5} {row['tree']:45} floor {floor:6.1f}  x {first:5.2f}, best {best:5.2f}  "
        f"plan {row['plan_us']:5.0f} us  {cuts}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
