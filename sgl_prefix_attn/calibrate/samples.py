"""Measured batches, one JSON line each behind a header, so that an interrupted run goes on."""

from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from sgl_prefix_attn.calibrate.batches import Batch
from sgl_prefix_attn.calibrate.writing import writing
from sgl_prefix_attn.plan.costs import GpuRates
from sgl_prefix_attn.predict.codec import CalibrationError, parsed, read_record, write_record
from sgl_prefix_attn.predict.record import CalibrationKey, Count, Positive

FORMAT = 2
Microseconds = Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True)
class Task:
    """What is measured: `count` batches of batches.draw(seed, count, pool_tokens, page size)."""

    key: CalibrationKey
    num_sms: Positive
    versions: dict[str, str]
    seed: Count
    count: Count
    pool_tokens: Count


class Sample(NamedTuple):
    """Batch `number` of a task; its size and KV tokens prove that it is drawn alike today."""

    number: Count
    size: Count
    tokens: Count
    stock_us: Microseconds
    prefix_us: Microseconds

    def check(self, batch: Batch) -> None:
        """Raise CalibrationError if this was another batch."""
        if (change := batch.change_since(self.size, self.tokens)) is not None:
            raise CalibrationError(f"batch {self.number} {change}: measure with --fresh")


@dataclass(frozen=True)
class Header:
    """A file's first line: the task, the day (UTC) on which measuring began, measured rates."""

    task: Task
    date: date
    rates: GpuRates


@dataclass(frozen=True)
class Samples:
    """What a samples file holds; `size` is the file's up to the last whole line."""

    header: Header
    rows: list[Sample]
    size: int


def today() -> date:
    return datetime.now(timezone.utc).date()


def start(path: Path, task: Task, rates: GpuRates) -> None:
    """Begin a file of today with the header alone, in place of an older one. OSError names it."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(write_record(Header(task, today(), rates), FORMAT) + b"\n")


def append(path: Path, sample: Sample) -> None:
    """Add a line. OSError names the path."""
    with writing(path), path.open("ab") as file:
        file.write(msgspec.json.encode(sample) + b"\n")


def read(path: Path) -> Samples:
    """Read a file. A last line without its end was torn by a crash: it does not count.

    Raises CalibrationError that names the file and what is wrong with it.
    """
    try:
        data = path.read_bytes()
        size = data.rfind(b"\n") + 1
        first, *others = data[:size].splitlines() or [b""]
        return Samples(read_record(first, Header, FORMAT), [_sample(line) for line in others], size)
    except (OSError, CalibrationError) as error:
        raise CalibrationError(f"{path}: {error}") from None


def drop_torn_line(path: Path, samples: Samples) -> None:
    """Cut off what read() did not count, so that append() starts a line of its own."""
    with writing(path), path.open("rb+") as file:
        file.truncate(samples.size)


def _sample(line: bytes) -> Sample:
    try:
        return parsed(line, Sample)
    except CalibrationError as error:
        raise CalibrationError(f"no sample: {line[:80]!r}: {error}") from None
