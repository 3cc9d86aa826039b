"""python -m eval.split_gains [--json OUT]: how often splitting nodes is predicted to win.

Plans PAT's 20 trees and random batches for the portable kernel, once with all nodes merged and once
as the planner does, by the rates of an H100; needs no GPU. A win is more than half a per cent.
"""

from __future__ import annotations

import argparse
import math
import sys
from statistics import geometric_mean

from eval import provenance
from eval.bench_kernel.trees import PAT20, Tree
from eval.cli_values import output, several
from sgl_prefix_attn.execute.backends.portable_backend import PortableBackend
from sgl_prefix_attn.plan.kernel_rates import PortableRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig, PathTable
from sgl_prefix_attn.tools.calibrate.batches import draw
from sgl_prefix_attn.tools.model_heads import parse_heads

_SMS, _HEAD_DIM = 132, 128
_BATCHES, _SEED, _POOL_TOKENS = 260, 7, 1 << 19
_WIN = 1.005


def gain(paths: PathTable, heads: HeadConfig) -> float:
    """Return the predicted time with all nodes merged over that of the planner's cut."""
    config = PortableBackend.config_for(heads)

    def fastest(splits_nodes: bool) -> float:
        planner = Planner(
            heads, num_sms=_SMS * config.ctas, rates=PortableRates(), tile_rows=config.tile_rows,
            splits_nodes=splits_nodes,
        )  # fmt: skip
        return planner.plan(paths).predicted_us

    return fastest(False) / fastest(True)


def _heads(text: str) -> HeadConfig:
    """Parse heads that the portable kernel is built for. Raises ValueError."""
    heads = HeadConfig(*parse_heads(text), _HEAD_DIM)
    PortableBackend.config_for(heads)
    return heads


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.split_gains", description=__doc__)
    parser.add_argument("--heads", type=several(_heads), default="32/8,64/8,16/8,8/1")
    parser.add_argument("--json", type=output, metavar="OUT")
    args = parser.parse_args(argv)
    drawn = [batch.paths for batch in draw(_SEED, _BATCHES, _POOL_TOKENS)]
    sets = {"20 trees": [Tree.parse(text).paths() for text in PAT20], "random batches": drawn}
    rows = []
    for heads in args.heads:
        for name, batches in sets.items():
            gains = [gain(paths, heads) for paths in batches]
            row = {
                "heads": f"{heads.num_qo_heads}/{heads.num_kv_heads}",
                "batches": name,
                "count": len(gains),
                "wins": sum(one > _WIN for one in gains),
                "mean_gain": geometric_mean(gains),
                "largest_gain": max(gains, default=math.nan),
            }
            rows.append(row)
            print(
                f"{row['heads']:5} {name:14} split wins on {row['wins']:3} of {row['count']}, "
                f"gain {row['mean_gain']:.4f} on average, {row['largest_gain']:.3f} at most",
                flush=True,
            )
    if args.json:
        provenance.save(args.json, provenance.collect("eval.split_gains", argv), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
