"""A calibration from start to end: rates, measured batches, cross-validated fit.

Measuring needs a GPU and leaves a samples file; fitting needs that file alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sgl_prefix_attn.calibrate import fit, samples
from sgl_prefix_attn.calibrate.batches import MAX_BATCH, Batch, draw
from sgl_prefix_attn.calibrate.rates import MAX_QUERIES, check_plausible, measure_rates
from sgl_prefix_attn.calibrate.samples import Header, Sample, Task
from sgl_prefix_attn.plan import CostModel, Planner
from sgl_prefix_attn.plan.costs import GpuRates, usual_rates
from sgl_prefix_attn.plan.tile_defaults import gpu_tile_set
from sgl_prefix_attn.predict.codec import CalibrationError
from sgl_prefix_attn.predict.record import Calibration, Origin
from sgl_prefix_attn.predict.stock_time import StockWork, stock_work
from sgl_prefix_attn.records import PlanWork

MIN_SAMPLES = 40


def measure(
    task: Task,
    path: Path,
    new_meter: Callable,
    *,
    fresh: bool = False,
    say: Callable[[str], None] = print,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Fill the samples file; what an earlier run of the same task left there is kept.

    new_meter  (planner, most requests) -> measure.BatchMeter
    say        gets messages, progress the number of batches done
    Raises RuntimeError where a kernel is wrong or a rate implausible.
    """
    earlier = None if fresh else _earlier(task, path, say)
    if earlier is None:
        rates, rows = _measure_rates(task, new_meter), {}
        samples.start(path, task, rates)
    else:
        samples.drop_torn_line(path, earlier)
        rates, rows = earlier.header.rates, {row.number: row for row in earlier.rows}
        say(f"{len(rows)} of {task.count} batches are in {path} already")
    say(f"rates: {rates}")
    meter = None
    for index, batch in enumerate(_batches(task)):
        if index in rows:
            rows[index].check(batch)
        else:
            meter = meter or new_meter(_planner(task, rates), MAX_BATCH)
            sample = Sample(index, batch.size, batch.tokens, *meter.measure(batch))
            samples.append(path, sample)
        progress(index + 1)


def _earlier(task: Task, path: Path, say: Callable[[str], None]) -> samples.Samples | None:
    if not path.exists():
        return None
    try:
        earlier = samples.read(path)
    except CalibrationError as error:
        say(f"starting afresh: {error}")
        return None
    if earlier.header.task != task:
        say(f"starting afresh: {path} holds samples of {earlier.header.task}")
        return None
    return earlier


def _measure_rates(task: Task, new_meter: Callable) -> GpuRates:
    """In a scope of its own: its meter's memory is free again before the next one is made."""
    key = task.key
    planner = _planner(task, usual_rates(key.gpu), strategy="naive")
    meter = new_meter(planner, MAX_QUERIES)
    rates = measure_rates(meter, planner, key.kv_bytes, task.pool_tokens, key.page_size)
    check_plausible(rates, key.gpu)
    return rates


@dataclass(frozen=True)
class Measured:
    """Batches with the work that they are for either kernel, and their microseconds [n]."""

    header: Header
    batches: list[Batch]
    stock_works: list[StockWork]
    prefix_works: list[PlanWork]
    stock_us: np.ndarray
    prefix_us: np.ndarray

    @property
    def costs(self) -> CostModel:
        key = self.header.task.key
        return CostModel.from_rates(self.header.rates, key.heads, key.kv_bytes)


@dataclass(frozen=True)
class HeldOut:
    """Predicted microseconds [n] of batches that the fit had not seen."""

    stock_us: np.ndarray
    prefix_us: np.ndarray


def read_measured(path: Path) -> Measured:
    """Read samples and draw their batches again.

    Raises CalibrationError: unusable file, too few samples, batches that are drawn otherwise.
    """
    file = samples.read(path)
    if len(file.rows) < MIN_SAMPLES:
        raise CalibrationError(f"{path}: {len(file.rows)} samples, a fit needs {MIN_SAMPLES}")
    task = file.header.task
    drawn = _batches(task)
    batches = []
    for row in file.rows:
        if not 0 <= row.number < task.count:
            raise CalibrationError(f"{path}: batch {row.number} of {task.count}")
        row.check(drawn[row.number])
        batches.append(drawn[row.number])
    planner, heads = _planner(task, file.header.rates), task.key.heads
    return Measured(
        header=file.header,
        batches=batches,
        stock_works=[
            stock_work(b.paths.seq_lens, b.unique_tokens, task.num_sms, heads) for b in batches
        ],
        prefix_works=[planner.plan(b.paths).work for b in batches],
        stock_us=np.array([row.stock_us for row in file.rows]),
        prefix_us=np.array([row.prefix_us for row in file.rows]),
    )


def hold_out(measured: Measured) -> HeldOut:
    """Predict each batch by the models that are fitted without it."""
    m = measured
    return HeldOut(
        fit.cross_validate(fit.STOCK_MODEL, m.stock_works, m.stock_us, m.costs),
        fit.cross_validate(fit.PREFIX_MODEL, m.prefix_works, m.prefix_us, m.costs),
    )


def finish(measured: Measured, held_out: HeldOut) -> Calibration:
    """Fit to all batches; the errors are those of the fits before."""
    m, task = measured, measured.header.task
    return Calibration(
        key=task.key,
        versions=task.versions,
        num_sms=task.num_sms,
        rates=m.header.rates,
        stock=fit.STOCK_MODEL.fit(m.stock_works, m.stock_us, m.costs),
        prefix=fit.PREFIX_MODEL.fit(m.prefix_works, m.prefix_us, m.costs),
        samples=len(m.batches),
        errors={
            "stock": fit.log_rms(held_out.stock_us, m.stock_us),
            "prefix": fit.log_rms(held_out.prefix_us, m.prefix_us),
        },
        origin=Origin(task.seed, task.count, task.pool_tokens, m.header.date),
        source="measured",
    )


def fit_samples(path: Path) -> Calibration:
    """Make a calibration from a samples file; needs no GPU. Raises CalibrationError."""
    measured = read_measured(path)
    return finish(measured, hold_out(measured))


def _batches(task: Task) -> list[Batch]:
    return draw(task.seed, task.count, task.pool_tokens, task.key.page_size)


def _planner(task: Task, rates: GpuRates, strategy: str = "calibrated") -> Planner:
    key = task.key
    return Planner(
        key.heads,
        tile_set=gpu_tile_set(task.num_sms, key.heads),
        strategy=strategy,
        costs=CostModel.from_rates(rates, key.heads, key.kv_bytes),
    )
