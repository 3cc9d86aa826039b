"""Measure held-out batches, or take stored measurements, and judge one calibration by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from eval.policy_holdout.rows import decided, measure
from sgl_prefix_attn.calibrate.batches import MAX_BATCH, Batch, draw
from sgl_prefix_attn.cli.calibrate_command import meter_factory, progress_bar
from sgl_prefix_attn.cli.model_heads import parse_heads
from sgl_prefix_attn.cli.named_gpus import server_of
from sgl_prefix_attn.execute.backends.family import ROW_TILES, Family, choose_family
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.record import CalibrationKey
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.step.evaluate import evaluate
from sgl_prefix_attn.step.policy import BatchFacts

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# Calibrations draw their batches from these (the command's default is 0, shipped ones included).
CALIBRATION_SEEDS = range(0, 101)


@dataclass(frozen=True)
class Setup:
    """What is measured, `batches` of each seed: the batches can be drawn again from it.

    Raises ValueError for heads that are none, and for a seed that is named twice.
    """

    gpu: str
    num_sms: int
    kernels: str  # of prefix steps, once settled: row_tiles or triton
    heads: str  # query/KV heads
    head_dim: int
    dtype: str
    page_size: int
    pool_tokens: int
    batches: int
    seeds: list[int]

    def __post_init__(self):
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must differ, got {self.seeds}")
        parse_heads(self.heads)

    @property
    def key(self) -> CalibrationKey:
        heads = HeadConfig(*parse_heads(self.heads), self.head_dim)
        return CalibrationKey(self.gpu, heads, DTYPES[self.dtype], self.page_size)

    def draw(self, seed: int) -> list[Batch]:
        return draw(seed, self.batches, self.pool_tokens, self.page_size)


class Holdout:
    """A calibration, and the rows that it makes of measurements.

    The calibration is that of a file, or the one that a server would use. Raises ValueError for one
    that cannot be used, or that has seen one of the seeds.
    """

    def __init__(self, setup: Setup, path: Path | None):
        self.setup = setup
        if path is not None:
            self.calibration, self._origin = store.load(path, setup.key), str(path)
        else:
            found = store.find(setup.key, setup.num_sms)
            self.calibration, self._origin = found.calibration, found.message
        for seed in setup.seeds:
            if seed in CALIBRATION_SEEDS or seed == self.calibration_seed:
                raise ValueError(
                    f"seed {seed} is not held out: {CALIBRATION_SEEDS[0]} to "
                    f"{CALIBRATION_SEEDS[-1]} are for calibrations, and this one was made with "
                    f"seed {self.calibration_seed}"
                )
        server = server_of(Family(setup.kernels), setup.key.heads, self.calibration)
        self.planner, self.predictor = server.planner, server.predictor

    @property
    def calibration_seed(self) -> int | None:
        """The seed of the batches behind the calibration, None where nothing was measured."""
        return self.calibration.origin and self.calibration.origin.seed

    def calibration_meta(self) -> dict:
        """Say about the calibration what a result file does."""
        found = self.calibration
        rates = self.planner.rates if self.setup.kernels == ROW_TILES else found.rates
        return {
            "origin": self._origin,
            "source": self.predictor.source,
            "seed": self.calibration_seed,
            "samples": found.samples,
            "errors": found.errors,
            "versions": found.versions,
            "rates": asdict(rates),
        }

    def run(self, meter, save: Callable[[list[dict]], object]) -> list[dict]:
        """Measure and judge every seed; save(rows so far) after each."""
        rows = []
        with progress_bar(Console(stderr=True)) as progress:
            bar = progress.add_task("", total=self.setup.batches * len(self.setup.seeds))
            for seed in self.setup.seeds:
                progress.update(bar, description=f"seed {seed}")
                batches, measured = self.setup.draw(seed), []
                for row in measure(seed, batches, meter):
                    measured.append(row)
                    progress.advance(bar)
                rows += [self._judge(row, batches[row["index"]]) for row in measured]
                save(rows)
        return rows

    def judge_again(self, stored: list[dict]) -> list[dict]:
        """Make new rows from the measurements in stored ones. Raises ValueError if their batches
        are drawn otherwise today."""
        batches = {seed: self.setup.draw(seed) for seed in {row["seed"] for row in stored}}
        rows = []
        for row in stored:
            batch = batches[row["seed"]][row["index"]]
            change = batch.change_since(row["batch_size"], row["tokens"])
            if change is not None:
                raise ValueError(
                    f"batch {row['index']} of seed {row['seed']} {change}: measure again"
                )
            rows.append(self._judge(row, batch))
        return rows

    def _judge(self, row: dict, batch: Batch) -> dict:
        # As a server's first step: nothing ran before, and the batch fills its graph.
        first = evaluate(batch.paths, BatchFacts(), self.planner, self.predictor)
        return row | decided(first.decision)


def find_gpu() -> tuple[str, int]:
    """Return the GPU's name and number of multiprocessors. Raises ValueError without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA GPU; --from FILE judges what was measured on one")
    properties = torch.cuda.get_device_properties(0)
    return torch.cuda.get_device_name(0), properties.multi_processor_count


def settled(setup: Setup) -> Setup:
    """Name the kernels that a server would run on the first GPU. Raises ValueError for row tiles
    that cannot run."""
    import torch

    from sgl_prefix_attn.execute.backends.choice import why_no_row_tiles

    heads, dtype = setup.key.heads, getattr(torch, DTYPES[setup.dtype])
    why_not = why_no_row_tiles(torch.device("cuda", 0), heads, dtype)
    family = choose_family(setup.kernels, "calibrated", why_not)
    return replace(setup, kernels=family.name)


def gpu_meter(setup: Setup, planner):
    """Make the calibration's BatchMeter for the setup, on the first GPU."""
    return meter_factory(setup.key, setup.pool_tokens)(planner, MAX_BATCH)
