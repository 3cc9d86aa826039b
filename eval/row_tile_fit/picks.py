"""What the planner picks of each sampled batch, by the times that were measured of its cuts."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from eval.row_tile_fit.measure import MOST_BATCHES, POOL_TOKENS
from eval.row_tile_fit.samples import Sample
from sgl_prefix_attn.calibrate.batches import Batch, draw
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.plan.row_tile_time import RowTileRates
from sgl_prefix_attn.records import HeadConfig


@dataclass(frozen=True)
class Picks:
    """Of one head configuration: batches that were sampled, and of those whose picked cut was
    timed, its time over the fastest timed one's: geometric mean and largest."""

    heads: str
    batches: int
    timed: int
    mean: float
    worst: float


def picks(found: list[Sample], rates: RowTileRates) -> list[Picks]:
    """Judge the planner's choice among the cuts of each batch that was timed. Raises ValueError
    where a batch, drawn again by its name, is another one."""
    seeds: dict[int, list[Batch]] = {}
    cuts: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in found:
        cuts[sample.heads, sample.batch].append(sample)
    ratios: dict[str, list[float]] = defaultdict(list)
    sampled: dict[str, int] = defaultdict(int)
    for (heads, name), mine in cuts.items():
        seed, index = map(int, name.split(":"))
        if seed not in seeds:
            seeds[seed] = draw(seed, MOST_BATCHES, POOL_TOKENS)
        forest = build_forest(seeds[seed][index].paths)
        if forest.unique_tokens != mine[0].unique_tokens:
            raise ValueError(f"batch {name} is drawn otherwise than when it was sampled")
        one = mine[0]
        config = HeadConfig(*parse_heads(heads), one.head_dim)
        planner = RowTilePlanner(config, num_sms=one.num_sms, rates=rates, headroom=0)
        cut = min(planner.promising(forest), key=lambda cut: cut.us)
        picked = Sample.of(one.gpu, one.num_sms, config, name, forest.unique_tokens, cut, 0.0)
        us = [sample.us for sample in mine if replace(sample, us=0.0) == picked]
        sampled[heads] += 1
        if us:
            ratios[heads].append(us[0] / min(sample.us for sample in mine))
    return [
        Picks(
            heads, count, len(ratios[heads]),
            math.exp(sum(map(math.log, ratios[heads])) / max(1, len(ratios[heads]))),
            max(ratios[heads], default=math.nan),
        )
        for heads, count in sampled.items()
    ]  # fmt: skip
