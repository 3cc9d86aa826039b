"""python -m eval.bench_latent_merge: what merging the parts of split tiles costs, over latent KV.

A server's plan, and the same plan whose parts are stored and then left alone, take turns by
CUDA-graph replay over several KV pools (median, cold L2). What takes longer in the first is to
count parts, to wait for those of others, to read them and to store their sum; with the bytes of
parts, written at 5 TB/s, that is the merge. Beside it stands 1.3 x (those bytes, written and read
once) / 5 TB/s + 1 us. Outputs of the plan are judged against fp64; those of parts left alone must
be wrong.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

import torch

from eval import provenance
from eval.bench_kernel.__main__ import SEED
from eval.bench_kernel.case import DTYPE, Case, build_case
from eval.bench_kernel.oracle import Oracle, Wrong
from eval.bench_kernel.providers.planned import PlannedRunnable
from eval.bench_kernel.trees import parse_trees
from eval.cli_values import benchmark, several, told
from eval.markdown import table
from sgl_prefix_attn.execute.backends.choice import why_no_hopper
from sgl_prefix_attn.kernels import words as W
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.tools.argument_types import count
from sgl_prefix_attn.tools.calibrate.timing import LayerTimer, medians_us

TREES = "1,64_8192,256;1,16_8192,256;1,64_2048,256;1,64_8192,1024;1,4,64_2048,2048,256"
_ROUNDS = 5
_ROW_BYTES = 512 * 2 + 8  # half-precision columns, an LSE and two scales
_BYTES_PER_US = 5e6  # of what stays in the L2 cache


def main(argv: list[str]) -> int:
    parser = benchmark("eval.bench_latent_merge", __doc__)
    parser.add_argument("--trees", type=told(parse_trees), default=TREES, help="joined by ;")
    parser.add_argument(
        "--heads", type=several(count), default="16,8", help="query heads of a rank"
    )
    args = parser.parse_args(argv)
    if why_not := why_no_hopper(args.device, HeadConfig(args.heads[0], 1, 576, 512), DTYPE):
        parser.error(f"argument --device: no kernel over latent KV on {args.device}: {why_not}")
    meta = provenance.collect("eval.bench_latent_merge", argv, seed=SEED)
    rows: list[dict] = []
    for heads in args.heads:
        for tree in args.trees:
            case = build_case(
                tree, HeadConfig(heads, 1, 576, 512), 1, DTYPE, args.device, seed=SEED
            )
            rows.append({"tree": tree.name, "heads": heads} | _measured(case))
            provenance.save(args.json, meta, rows)
    print(table(("tree", "heads", "items", "us", "merge, us", "bound, us"), map(_cells, rows)))
    return 0


def _measured(case: Case) -> dict:
    oracle = Oracle(case)
    made = [PlannedRunnable(case), PlannedRunnable(case, change=parts_alone)]
    timers = [LayerTimer(one.run, case.num_layers, case.device, capture=True) for one in made]
    for timer in timers:
        timer.replay()
    part_rows = made[0].stats.num_partials * case.heads.group_size
    error = oracle.judge(timers[0].outs, "merged")
    if part_rows:
        _must_be_wrong(oracle, timers[1].outs)
    rounds = [medians_us(timers) for _ in range(_ROUNDS)]
    us, alone_us = (statistics.median(times) for times in zip(*rounds, strict=True))
    written_us = part_rows * _ROW_BYTES / _BYTES_PER_US
    return {
        "items": made[0].stats.num_items,
        "part_rows": part_rows,
        "us": us,
        "alone_us": alone_us,
        "merge_us": us - alone_us + written_us,
        "each_merge_us": [merged - alone + written_us for merged, alone in rounds],
        "bound_us": 1.3 * 2 * written_us + 1,
        "error": error,
    }


def parts_alone(plan: Plan) -> Plan:
    """Return a plan of whose split tiles nobody counts the parts, which are stored as ever."""
    alone = replace(plan, words=plan.words.copy())
    items = alone.items
    items[items[:, W.I_PARTS] > 1, W.I_PARTS] = W.BY_QUERY
    return alone


def _must_be_wrong(oracle: Oracle, outs: list[torch.Tensor]) -> None:
    try:
        oracle.judge(outs, "parts alone")
    except Wrong:
        return
    raise RuntimeError("outputs of parts that were not merged are right: what was timed?")


def _cells(row: dict) -> tuple:
    us = (f"{row[name]:.1f}" for name in ("us", "merge_us", "bound_us"))
    return f"`{row['tree']}`", row["heads"], row["items"], *us


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
