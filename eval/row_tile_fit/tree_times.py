"""What the rates predict of the trees that eval.bench_kernel measured over row tiles."""

from __future__ import annotations

import math
from statistics import fmean
from typing import NamedTuple

from eval.bench_kernel.trees import parse_trees
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.cli.named_gpus import GPUS
from sgl_prefix_attn.plan.costs import GPU_RATES, known_rates
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.predict.row_tile_rates import rates_of_gpu
from sgl_prefix_attn.records import HeadConfig


class TreeTime(NamedTuple):
    """Microseconds per layer."""

    tree: str
    heads: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def tree_times(result: dict, provider: str) -> list[TreeTime]:
    """Predict what a result of eval.bench_kernel says of a provider that ran row tiles.

    Raises ValueError for a GPU that is not known by name, and where the provider ran nothing.
    """
    gpu = result["meta"].get("gpu")
    sms = {known.name: known.num_sms for known in GPUS.values()}
    if gpu not in sms:
        raise ValueError(f"measured on {gpu}; known are {', '.join(sms)}")
    rates = rates_of_gpu(gpu, (known_rates(gpu) or GPU_RATES["H100"]).bandwidth)
    found = []
    for row in result["rows"]:
        if row.get("provider") != provider or row["status"] != "ok":
            continue
        heads = HeadConfig(*parse_heads(row["heads"]), row["head_dim"])
        planner = RowTilePlanner(heads, num_sms=sms[gpu], rates=rates)
        (tree,) = parse_trees(row["tree"])
        plan = planner.plan_forest(build_forest(tree.paths()))
        found.append(TreeTime(tree.name, row["heads"], row["us"], plan.predicted_us))
    if not found:
        raise ValueError(f"{provider} ran nothing")
    return found


def text(times: list[TreeTime]) -> str:
    """A line for each tree; their geometric mean and root mean square of logarithms."""
    logs = [math.log(one.ratio) for one in times]
    rms = math.sqrt(fmean(value * value for value in logs))
    lines = [
        f"{one.heads:6} {one.tree:48} {one.measured:8.1f} us, predicted {one.predicted:8.1f}: "
        f"{one.ratio:.3f}"
        for one in times
    ]
    mean = math.exp(fmean(logs))
    return "\n".join([*lines, f"{len(times)} trees: {mean:.3f}, rms of logarithms {rms:.3f}"])
