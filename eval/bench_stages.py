"""python -m eval.bench_stages: what each stage of the Triton kernels costs, by leaving others out.

The same launches run over the same plan with some of its words blanked: without its merges, with
only its tails' or only its shared items, or with nothing to do, which is what launching costs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import torch

from eval import provenance
from eval.bench_kernel.case import DTYPES, Case, build_case
from eval.bench_kernel.floor import floor_us, rates_of
from eval.bench_kernel.trees import parse_trees
from eval.cli_values import device, output
from sgl_prefix_attn.calibrate.timing import LayerTimer
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.execute.backends.choice import new_backend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.kernels import layout as L
from sgl_prefix_attn.plan import Planner, TileSet
from sgl_prefix_attn.plan.tile_defaults import default_tile_set
from sgl_prefix_attn.predict.startup import default_costs
from sgl_prefix_attn.records import HeadConfig, Plan

STAGES = ("all", "forward", "tails", "shared", "empty")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench_stages", description=__doc__.split(":", 1)[1]
    )
    parser.add_argument("--trees", default="pat20", help="as in eval.bench_kernel")
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--device", type=device, default="cuda", help="an NVIDIA GPU")
    parser.add_argument("--json", type=output, metavar="OUT")
    args = parser.parse_args(argv)
    try:
        heads = HeadConfig(*parse_heads(args.heads), 128)
        trees = parse_trees(args.trees)
    except ValueError as error:
        parser.error(str(error))
    if args.device.type != "cuda":
        parser.error(f"--device {args.device}: stages are launches on an NVIDIA GPU")
    dtype = DTYPES["bf16"]
    rates = rates_of(args.device)
    meta = provenance.collect("eval.bench_stages", argv or sys.argv[1:])
    rows = []
    print("microseconds per layer; merge = all - forward")
    for tree in trees:
        case = build_case(tree, heads, 1, dtype, args.device, seed=0)
        times = {stage: _time(case, stage) for stage in STAGES}
        floor = floor_us(tree, heads, dtype.itemsize, rates)
        rows.append({"tree": tree.name, "heads": args.heads, "stage_floor_us": floor, **times})
        parts = "  ".join(f"{stage} {times[stage]:.1f}" for stage in STAGES)
        merge = times["all"] - times["forward"]
        print(f"{tree.name}: floor {floor:.1f}  {parts}  merge {merge:.1f}", flush=True)
        if args.json:
            provenance.save(args.json, meta, rows)
        del case
        torch.cuda.empty_cache()
    return 0


def without(plan: Plan, tile_set: TileSet, stage: str) -> Plan:
    """Blank the plan's words of the stages that `stage` leaves out."""
    words = plan.words.copy()
    if stage != "all":
        words[L.H_NUM_MERGES] = 0
    for i, tile in enumerate(tile_set.tiles):
        kept = stage in ("all", "forward") or stage == ("tails" if tile.requests else "shared")
        if not kept:
            words[L.H_QUEUES + 2 * i + 1] = 0
    return replace(plan, words=words)


def _time(case: Case, stage: str) -> float:
    tile_set = default_tile_set(case.device, case.heads)
    costs = default_costs(case.device, case.heads, case.dtype, case.page_size)
    planner = Planner(case.heads, tile_set=tile_set, costs=costs)
    plan = planner.plan(case.tree.paths())
    backend = new_backend(case.device, case.heads, case.dtype, tile_set)
    executor = PlanExecutor(backend, Capacity.for_plans(plan))
    rows = torch.arange(case.tree.batch_size, device=case.device)
    executor.load(without(plan, tile_set, stage), case.req_to_token, rows)
    out = case.new_out()

    def run(layer: int) -> torch.Tensor:
        k, v = case.k[layer], case.v[layer]
        executor.run(LayerParams(case.q, k, v, case.seq_lens, out[layer], None, case.sm_scale, 0.0))
        return out[layer]

    return LayerTimer(run, case.num_layers, case.device, capture=True).us()


if __name__ == "__main__":
    sys.exit(main())
