"""What the planner picks of each sampled batch, by the times that were measured of its cuts."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from statistics import geometric_mean

from eval.row_tile_fit.measure import MOST_BATCHES, POOL_TOKENS
from eval.row_tile_fit.samples import Sample
from sgl_prefix_attn.calibrate.batches import draw
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tile_time import RowTileRates


@dataclass(frozen=True)
class Picks:
    """Of one head configuration: batches that were sampled, and of those whose picked cut was
    timed, its time over the fastest timed one's: geometric mean and largest, NaN where none was."""

    heads: str
    batches: int
    timed: int
    mean: float
    worst: float


def picks(found: list[Sample], rates: RowTileRates) -> list[Picks]:
    """Judge the planner's choice among the cuts of each batch that was timed. Raises ValueError
    where a batch, drawn again by its name, is another one."""
    drawn = cache(lambda seed: draw(seed, MOST_BATCHES, POOL_TOKENS))
    batches: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in found:
        batches[sample.heads][sample.batch].append(sample)
    judged = []
    for heads, of_batch in batches.items():
        one = next(iter(of_batch.values()))[0]
        planner = RowTilePlanner(one.head_config, num_sms=one.num_sms, rates=rates, headroom=0)
        ratios = []
        for name, mine in of_batch.items():
            seed, index = map(int, name.split(":"))
            forest = build_forest(drawn(seed)[index].paths)
            if forest.unique_tokens != mine[0].unique_tokens:
                raise ValueError(f"batch {name} is drawn otherwise than when it was sampled")
            cut = min(planner.promising(forest), key=lambda cut: cut.us)
            picked = Sample.of(
                one.gpu, one.num_sms, planner.heads, name, forest.unique_tokens, cut, 0.0
            )
            us = [sample.us for sample in mine if replace(sample, us=0.0) == picked]
            if us:
                ratios.append(us[0] / min(sample.us for sample in mine))
        mean = geometric_mean(ratios) if ratios else math.nan
        judged.append(Picks(heads, len(of_batch), len(ratios), mean, max(ratios, default=math.nan)))
    return judged
