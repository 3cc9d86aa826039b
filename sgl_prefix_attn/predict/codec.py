"""Records <-> JSON bytes. Nothing that does not check is ever returned."""

from typing import Any, TypeVar

import msgspec

from sgl_prefix_attn.predict.record import Calibration

FORMAT = 3  # of a calibration
T = TypeVar("T")


class CalibrationError(ValueError):
    """A calibration, or the samples for one, that cannot be used; the message says why."""


def encode(calibration: Calibration) -> bytes:
    """Write JSON from which every float reads back as the same float.

    Raises CalibrationError for what decode would refuse, such as a time that is not finite.
    """
    data = write_record(calibration, FORMAT)
    decode(data)
    return data


def decode(data: bytes) -> Calibration:
    """Read what encode wrote. Raises CalibrationError that says what is wrong with the data."""
    return read_record(data, Calibration, FORMAT)


def write_record(record: object, version: int) -> bytes:
    """Write a dataclass and the number of its format as one JSON object."""
    return msgspec.json.encode({"format": version, **msgspec.to_builtins(record)})


def read_record(data: bytes, kind: type[T], version: int) -> T:
    """Read what write_record wrote.

    Raises CalibrationError that names the first field that is bad, missing or unknown.
    """
    fields = parsed(data, dict[str, Any])
    found = fields.pop("format", None)
    if found != version:
        raise CalibrationError(f"format {found!r}, this version reads {version}")
    try:
        record = msgspec.convert(fields, kind)
    except msgspec.MsgspecError as error:
        raise CalibrationError(str(error)) from None
    written = msgspec.to_builtins(record)
    for name, value in fields.items():
        if written.get(name) != value:
            raise CalibrationError(f"{name}: more or fewer fields than this version writes")
    return record


def parsed(data: bytes, kind: type[T]) -> T:
    """Read JSON of one type. Raises CalibrationError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CalibrationError(str(error)) from None
