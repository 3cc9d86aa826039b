"""Measured batches, one JSON line each behind a header, so that an interrupted run goes on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from sgl_prefix_attn.predict.codec import CalibrationError, parsed, read_record, write_record
from sgl_prefix_attn.predict.record import CalibrationKey, Count, Positive, Rate
from sgl_prefix_attn.predict.stock_time import KvCosts
from sgl_prefix_attn.tools.calibrate.batches import Batch
from sgl_prefix_attn.tools.calibrate.writing import writing

FORMAT = 3
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


class CutTime(NamedTuple):
    """predicted_us: by the rates of the header, proves that the batch is cut alike today."""

    predicted_us: Microseconds
    us: Microseconds


class Sample(NamedTuple):
    """Batch `number` of a task; its size and KV tokens prove that it is drawn alike today.

    cuts: times of cuts.chosen, in its order; empty where the fallback alone was measured
    """

    number: Count
    size: Count
    tokens: Count
    stock_us: Microseconds
    cuts: list[CutTime]

    def check(self, batch: Batch) -> None:
        """Raise CalibrationError if this was another batch."""
        if (batch.size, batch.tokens) != (self.size, self.tokens):
            raise CalibrationError(
                f"batch {self.number} had {self.size} requests and {self.tokens} tokens when it "
                f"was measured, now it has {batch.size} and {batch.tokens}: measure with --fresh"
            )

    def check_cuts(self, predicted: Sequence[float]) -> None:
        """Raise CalibrationError if other cuts than those predicted so were measured."""
        alike = len(predicted) == len(self.cuts) and all(
            math.isclose(us, cut.predicted_us, rel_tol=1e-9)
            for us, cut in zip(predicted, self.cuts, strict=True)
        )
        if not alike:
            raise CalibrationError(
                f"batch {self.number} had other cuts when it was measured: measure with --fresh"
            )


@dataclass(frozen=True)
class Header:
    """A file's first line.

    date       (UTC) on which measuring began
    bandwidth  measured bytes/us of a paged gather
    start      rates by which the planner chose cuts, and where the fit begins
    num_ctas   that the kernel has at once, and whose tiles have tile_rows rows
    splits_nodes  whether it merges by query, so that plans may split nodes off
    """

    task: Task
    date: date
    bandwidth: Rate
    start: dict[str, Rate]
    num_ctas: Positive
    tile_rows: Positive
    splits_nodes: bool

    @property
    def kv_costs(self) -> KvCosts:
        key = self.task.key
        return KvCosts.of(self.bandwidth, key.heads, key.kv_bytes)


@dataclass(frozen=True)
class Samples:
    """What a samples file holds; `size` is the file's up to the last whole line, in bytes."""

    header: Header
    rows: list[Sample]
    size: int


def today() -> date:
    return datetime.now(timezone.utc).date()


def start(path: Path, header: Header) -> None:
    """Begin a file with the header alone, in place of an older one. OSError names it."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(write_record(header, FORMAT) + b"\n")


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


def _sample(line: bytes) -> Sample:
    try:
        return parsed(line, Sample)
    except CalibrationError as error:
        raise CalibrationError(f"no sample: {line[:80]!r}: {error}") from None
