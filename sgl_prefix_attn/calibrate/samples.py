"""Measured batches, one JSON line each behind a header, so that an interrupted run goes on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from sgl_prefix_attn.calibrate.batches import Batch
from sgl_prefix_attn.plan.costs import GpuRates
from sgl_prefix_attn.predict.codec import (
    CalibrationError,
    date_from_json,
    key_from_json,
    key_to_json,
    rates_from_json,
    read_json,
    versions_from_json,
)
from sgl_prefix_attn.predict.record import CalibrationKey
from sgl_prefix_attn.predict.writing import writing

FORMAT = 1


@dataclass(frozen=True)
class Task:
    """What is measured: `count` batches of batches.draw(seed, count, pool_tokens, page size)."""

    key: CalibrationKey
    num_sms: int
    versions: dict[str, str]
    seed: int
    count: int
    pool_tokens: int


class Sample(NamedTuple):
    """Batch `index` of a task; its size and KV tokens prove that it is drawn alike today."""

    index: int
    size: int
    tokens: int
    stock_us: float
    prefix_us: float

    def check(self, batch: Batch) -> None:
        """Raises CalibrationError if this was another batch."""
        change = batch.change_since(self.size, self.tokens)
        if change is not None:
            raise CalibrationError(f"batch {self.index} {change}: measure with --fresh")


@dataclass(frozen=True)
class Samples:
    """What a samples file holds: date (UTC) of its first line; `size` is the file's up to the last
    whole line."""

    task: Task
    date: str
    rates: GpuRates
    rows: list[Sample]
    size: int


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def start(path: Path, task: Task, rates: GpuRates) -> None:
    """A new file of today with the header alone; replaces an older one. OSError names the path."""
    header = {
        "format": FORMAT,
        "date": today(),
        **asdict(task),
        "key": key_to_json(task.key),
        "rates": asdict(rates),
    }
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(header) + b"\n")


def append(path: Path, sample: Sample) -> None:
    """OSError names the path."""
    with writing(path), path.open("ab") as file:
        file.write(orjson.dumps(tuple(sample)) + b"\n")


def read(path: Path) -> Samples:
    """A last line without its end was torn by a crash: it does not count.

    Raises CalibrationError that names the file and what is wrong with it.
    """
    try:
        data = path.read_bytes()
        size = data.rfind(b"\n") + 1
        lines = data[:size].splitlines()
        if not lines:
            raise CalibrationError("it has no header")
        header = read_json(lines[0])
        if header.get("format") != FORMAT:
            raise CalibrationError(f"format {header.get('format')!r}, this version reads {FORMAT}")
        return Samples(
            task=_task(header),
            date=date_from_json(header["date"]),
            rates=rates_from_json(header["rates"]),
            rows=[_sample(line) for line in lines[1:]],
            size=size,
        )
    except KeyError as error:
        raise CalibrationError(f"{path}: {error.args[0]} is missing") from None
    except (OSError, TypeError, AttributeError, CalibrationError) as error:
        raise CalibrationError(f"{path}: {error}") from None


def drop_torn_line(path: Path, samples: Samples) -> None:
    """Cut off what read() did not count, so that append() starts a line of its own."""
    with writing(path), path.open("rb+") as file:
        file.truncate(samples.size)


def _task(header: dict[str, Any]) -> Task:
    numbers = {name: header[name] for name in ("num_sms", "seed", "count", "pool_tokens")}
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 0:
            raise CalibrationError(f"{name} must be an integer >= 0, got {value!r}")
    return Task(
        key=key_from_json(header["key"]),
        versions=versions_from_json(header["versions"]),
        **numbers,
    )


def _sample(line: bytes) -> Sample:
    try:
        sample = Sample(*orjson.loads(line))
    except (orjson.JSONDecodeError, TypeError):
        raise CalibrationError(f"no sample: {line[:80]!r}") from None
    if not all(isinstance(value, (int, float)) for value in sample) or min(sample[3:]) <= 0:
        raise CalibrationError(f"no measured times: {line[:80]!r}")
    return sample
