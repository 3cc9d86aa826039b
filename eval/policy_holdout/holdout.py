"""Measure held-out batches, or take stored measurements, and judge one calibration by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from eval.policy_holdout import judge, source
from eval.policy_holdout.coverage import coverage
from eval.policy_holdout.looks import look
from eval.policy_holdout.rows import Measured, measure, row
from sgl_prefix_attn.calibrate.batches import MAX_BATCH, Batch, draw
from sgl_prefix_attn.cli.calibrate_command import meter_factory, progress_bar
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.tile_defaults import gpu_tile_set
from sgl_prefix_attn.predict.predictor import Predictor
from sgl_prefix_attn.predict.record import CalibrationKey
from sgl_prefix_attn.records import HeadConfig

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Setup:
    """What is measured, `batches` of each seed: the batches can be drawn again from it.

    Raises ValueError that names a bad field.
    """

    gpu: str
    num_sms: int
    heads: str  # query/KV heads
    head_dim: int
    dtype: str
    page_size: int
    pool_tokens: int
    batches: int
    seeds: list[int]

    def __post_init__(self):
        for name in ("page_size", "pool_tokens", "batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different integers >= 0, got {self.seeds}")
        parse_heads(self.heads)

    @property
    def key(self) -> CalibrationKey:
        heads = HeadConfig(*parse_heads(self.heads), self.head_dim)
        return CalibrationKey(self.gpu, heads, DTYPES[self.dtype], self.page_size)

    def draw(self, seed: int) -> list[Batch]:
        return draw(seed, self.batches, self.pool_tokens, self.page_size)


class Holdout:
    """A calibration, and the rows that it makes of measurements.

    Raises ValueError for a calibration that cannot be used, or that has seen one of the seeds.
    """

    def __init__(self, setup: Setup, calibration: Path | None):
        self.setup = setup
        self.source = source.find(calibration, setup.key, setup.num_sms)
        self.source.refuse(setup.seeds)
        self.predictor = Predictor(self.source.calibration)
        self.planner = Planner(
            setup.key.heads,
            tile_set=gpu_tile_set(setup.num_sms, setup.key.heads),
            costs=self.source.calibration.costs,
        )

    def run(self, meter, save: Callable[[list[dict]], None]) -> list[dict]:
        """Measure and judge every seed; save(rows so far) after each."""
        rows = []
        with progress_bar(Console(stderr=True)) as progress:
            bar = progress.add_task("", total=self.setup.batches * len(self.setup.seeds))
            for seed in self.setup.seeds:
                progress.update(bar, description=f"seed {seed}")
                measured = []
                for one in measure(seed, self.setup.draw(seed), meter):
                    measured.append(one)
                    progress.advance(bar)
                rows += self._rows(seed, measured)
                save(rows)
        return rows

    def judge_again(self, stored: list[dict]) -> list[dict]:
        """New rows from the measurements in stored ones. Raises ValueError if their batches are
        drawn otherwise today."""
        measured = [Measured.from_row(entry) for entry in stored]
        rows = []
        for seed in dict.fromkeys(one.seed for one in measured):
            rows += self._rows(seed, [one for one in measured if one.seed == seed])
        return rows

    def _rows(self, seed: int, measured: list[Measured]) -> list[dict]:
        batches = self.setup.draw(seed)
        rows = []
        for one in measured:
            batch = batches[one.index]
            one.check(batch)
            rows.append(row(batch, one, look(self.predictor, self.planner, batch.paths)))
        return rows


def summarise(rows: list[dict], policy_us: dict | None) -> dict:
    return judge.summarise(rows) | {"coverage": coverage(rows), "policy_us": policy_us}


def find_gpu() -> tuple[str, int]:
    """Name and multiprocessors. Raises ValueError without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA GPU; --from FILE judges what was measured on one")
    properties = torch.cuda.get_device_properties(0)
    return torch.cuda.get_device_name(0), properties.multi_processor_count


def gpu_meter(setup: Setup, planner: Planner):
    """calibration.measure.BatchMeter for the setup, on the first GPU."""
    return meter_factory(setup.key, setup.pool_tokens)(planner, MAX_BATCH)
