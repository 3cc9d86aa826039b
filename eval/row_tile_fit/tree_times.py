"""What the rates predict of the trees that eval.bench_kernel measured over row tiles."""

from __future__ import annotations

from functools import cache
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

from eval.bench_kernel.trees import parse_trees
from sgl_prefix_attn.calibrate.fit import log_rms
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.cli.named_gpus import GPUS, server_on
from sgl_prefix_attn.execute.backends.family import ROW_TILES
from sgl_prefix_attn.plan.forest import build_forest
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

    Raises ValueError for a GPU that is not known by name or runs no row tiles, and where the
    provider ran nothing.
    """
    name = result["meta"].get("gpu")
    gpus = {gpu.name: gpu for gpu in GPUS.values()}
    if name not in gpus:
        raise ValueError(f"measured on {name}; known are {', '.join(gpus)}")

    @cache
    def planner_of(heads: HeadConfig):
        return server_on(gpus[name], heads, ROW_TILES).planner

    found = []
    for row in result["rows"]:
        if row.get("provider") != provider or row["status"] != "ok":
            continue
        heads = HeadConfig(*parse_heads(row["heads"]), row["head_dim"])
        (tree,) = parse_trees(row["tree"])
        plan = planner_of(heads).plan_forest(build_forest(tree.paths()))
        found.append(TreeTime(tree.name, row["heads"], row["us"], plan.predicted_us))
    if not found:
        raise ValueError(f"{provider} ran nothing")
    return found


def text(times: list[TreeTime]) -> str:
    """A line for each tree; their geometric mean and root mean square of logarithms."""
    predicted, measured = (
        np.array([getattr(one, name) for one in times]) for name in ("predicted", "measured")
    )
    lines = [
        f"{one.heads:6} {one.tree:48} {one.measured:8.1f} us, predicted {one.predicted:8.1f}: "
        f"{one.ratio:.3f}"
        for one in times
    ]
    mean, rms = geometric_mean(one.ratio for one in times), log_rms(predicted, measured)
    return "\n".join([*lines, f"{len(times)} trees: {mean:.3f}, rms of logarithms {rms:.3f}"])
