"""A calibration from start to end: bandwidth, measured batches, cross-validated fits.

Measuring needs a GPU and leaves a samples file; fitting needs that file alone.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.kernel_rates import KernelRates
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.plan.tiles import Cut
from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.bandwidths import known_bandwidth, usual_bandwidth
from sgl_prefix_attn.predict.codec import CalibrationError
from sgl_prefix_attn.predict.record import Calibration, Origin, rates_of
from sgl_prefix_attn.predict.stock_time import StockWork, stock_physical, stock_start, stock_work
from sgl_prefix_attn.tools.calibrate import cuts, fit, samples
from sgl_prefix_attn.tools.calibrate.batches import Batch, draw
from sgl_prefix_attn.tools.calibrate.samples import CutTime, Header, Sample, Task

MIN_SAMPLES = 40
MOST_ERROR = 0.15  # of a fallback's predicted times, on unseen batches; of shipped ones 4 to 9 %
_PLAUSIBLE = 4.0  # a measured bandwidth is at most so many times the table's, or its inverse


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

    new_meter  () -> measure.BatchMeter of the task's key
    say        gets messages, progress the number of batches done
    Raises RuntimeError where a kernel is wrong or the bandwidth implausible.
    """
    meter = None
    earlier = None if fresh else _earlier(task, path, say)
    if earlier is None:
        meter, rows = new_meter(), {}
        header = _header(task, meter)
        samples.start(path, header)
    else:
        os.truncate(path, earlier.size)  # a torn line: append() starts one of its own
        header, rows = earlier.header, {row.number: row for row in earlier.rows}
        say(f"{len(rows)} of {task.count} batches are in {path} already")
    say(f"bandwidth: {header.bandwidth:.4g} bytes/us")
    planner = planner_of(header)
    for index, batch in enumerate(_batches(task)):
        if index in rows:
            rows[index].check(batch)
        else:
            meter = meter or new_meter()
            samples.append(path, _sample(index, batch, planner, meter))
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


def _header(task: Task, meter) -> Header:
    """Measure the bandwidth. Raises RuntimeError where a known GPU is far from what it sustains."""
    key = task.key
    shipped = store.find(key, task.num_sms, folders=store.Folders(None, store.SHIPPED))
    header = Header(
        task=task,
        date=samples.today(),
        bandwidth=usual_bandwidth(key.gpu),
        start=shipped.calibration.rates,
        num_ctas=meter.backend.num_sms,
        tile_rows=meter.backend.tile_rows,
        splits_nodes=meter.backend.splits_nodes,
    )
    bandwidth = meter.bandwidth(planner_of(header))
    usual = known_bandwidth(key.gpu) or bandwidth
    if not 1 / _PLAUSIBLE <= bandwidth / usual <= _PLAUSIBLE:
        raise RuntimeError(
            f"{key.gpu}: measured bandwidth {bandwidth:.4g} bytes/us, usual is {usual:.4g}: is "
            "another process using the GPU?"
        )
    return replace(header, bandwidth=bandwidth)


def _sample(index: int, batch: Batch, planner: Planner, meter) -> Sample:
    forest = build_forest(batch.paths)
    tried = cuts.chosen(planner, forest)
    [stock_us], cut_us = meter.measure(batch, [planner.serialize(forest, cut) for cut in tried])
    times = [CutTime(cut.us, us) for cut, us in zip(tried, cut_us, strict=True)]
    return Sample(index, batch.size, batch.tokens, stock_us, times)


@dataclass(frozen=True)
class Measured:
    """n batches with what their times are predicted from, and their microseconds: of the fallback
    [n], and of each batch's cuts."""

    header: Header
    batches: list[Batch]
    works: list[StockWork]
    cuts: list[list[Cut]]
    stock_us: np.ndarray
    cut_us: list[np.ndarray]


@dataclass(frozen=True)
class HeldOut:
    """Predicted microseconds of batches that the fits had not seen, as in Measured."""

    stock_us: np.ndarray
    cut_us: list[np.ndarray]


def read_measured(path: Path) -> Measured:
    """Read samples, draw their batches and cut them again.

    Raises CalibrationError: unusable file, too few samples, batches that are drawn or cut
    otherwise.
    """
    file = samples.read(path)
    if len(file.rows) < MIN_SAMPLES:
        raise CalibrationError(f"{path}: {len(file.rows)} samples, a fit needs {MIN_SAMPLES}")
    task, planner = file.header.task, planner_of(file.header)
    drawn = _batches(task)
    batches, tried = [], []
    for row in file.rows:
        if not 0 <= row.number < task.count:
            raise CalibrationError(f"{path}: batch {row.number} of {task.count}")
        batch = drawn[row.number]
        row.check(batch)
        found = cuts.chosen(planner, build_forest(batch.paths)) if row.cuts else []
        row.check_cuts([cut.us for cut in found])
        batches.append(batch)
        tried.append(found)
    heads, num_sms = task.key.heads, task.num_sms
    fallback, kv_bytes = task.key.fallback, task.key.kv_bytes
    return Measured(
        header=file.header,
        batches=batches,
        works=[
            stock_work(b.paths.seq_lens, b.unique_tokens, num_sms, heads, fallback, kv_bytes)
            for b in batches
        ],
        cuts=tried,
        stock_us=np.array([row.stock_us for row in file.rows]),
        cut_us=[np.array([cut.us for cut in row.cuts]) for row in file.rows],
    )


def hold_out(measured: Measured) -> HeldOut:
    """Predict each batch by models that are fitted without it."""
    m, costs, planner = measured, measured.header.kv_costs, planner_of(measured.header)
    predicted = fit.cross_validate(
        lambda seen: (fit_stock(m, seen), fit_rates(m, planner, seen)),
        lambda fitted, i: (
            stock_physical(fitted[0].values(), m.works[i], costs),
            cuts.predict(m.cuts[i], m.works[i].unique, planner, fitted[1]),
        ),
        len(m.batches),
    )
    stock_us, cut_us = zip(*predicted, strict=True)
    return HeldOut(np.array(stock_us), list(cut_us))


def fit_stock(measured: Measured, seen: list[int]) -> dict[str, float]:
    """Fit the fallback's coefficients to some of the batches."""
    works, us = [measured.works[i] for i in seen], measured.stock_us[seen]
    key = measured.header.task.key
    start = stock_start(key.heads, key.fallback, key.kv_bytes)
    return fit.fit_stock(works, us, measured.header.kv_costs, start)


def fit_rates(measured: Measured, planner: Planner, seen: list[int]) -> KernelRates:
    """Fit the kernels' rates to the cuts of some of the batches."""

    def predict(rates: KernelRates) -> np.ndarray:
        parts = [
            cuts.predict(measured.cuts[i], measured.works[i].unique, planner, rates) for i in seen
        ]
        return np.concatenate(parts)

    us = np.concatenate([measured.cut_us[i] for i in seen])
    return fit.fit_rates(predict, us, planner.rates)


def finish(measured: Measured, held_out: HeldOut) -> Calibration:
    """Fit to all batches; the errors are those of the fits before.

    Raises CalibrationError where these say that the formula does not describe the fallback: a
    server does better with a cautious guess.
    """
    m, task = measured, measured.header.task
    stock_error = fit.log_rms(held_out.stock_us, m.stock_us)
    if stock_error > MOST_ERROR:
        raise CalibrationError(
            f"{task.key.fallback}: the formula of its times does not fit this GPU. Predictions err "
            f"by {stock_error:.0%}, and by at most {MOST_ERROR:.0%} they are worth writing"
        )
    every = list(range(len(m.batches)))
    rates = fit_rates(m, planner_of(m.header), every)
    return Calibration(
        key=task.key,
        versions=task.versions,
        num_sms=task.num_sms,
        bandwidth=m.header.bandwidth,
        stock=fit_stock(m, every),
        rates=dict(vars(rates)),
        samples=len(every),
        errors={
            "stock": stock_error,
            "prefix": fit.log_rms(np.concatenate(held_out.cut_us), np.concatenate(m.cut_us)),
        },
        origin=Origin(task.seed, task.count, task.pool_tokens, m.header.date),
        source="measured",
    )


def planner_of(header: Header) -> Planner:
    """Make the planner of the cuts that are measured."""
    key = header.task.key
    return Planner(
        key.heads,
        num_sms=header.num_ctas,
        rates=rates_of(key.family, key.heads)(**header.start),
        headroom=0,
        tile_rows=header.tile_rows,
        splits_nodes=header.splits_nodes,
    )


def _batches(task: Task) -> list[Batch]:
    return draw(task.seed, task.count, task.pool_tokens, task.key.page_size)
