"""Records <-> JSON bytes. Nothing that does not check is ever returned."""

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import msgspec

from sgl_prefix_attn.predict.record import Calibration

FORMAT = 4  # of a calibration
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
    """Write a dataclass and the number of its format as one JSON object.

    A field that has its plain default is left out: what was written before there was such a field
    stays as it is, and readable.
    """
    return msgspec.json.encode({"format": version, **_plain(record)})


def read_record(data: bytes, kind: type[T], version: int) -> T:
    """Read what write_record wrote.

    Raises CalibrationError that names the first field that is bad, missing or unknown.
    """
    found_fields = parsed(data, dict[str, Any])
    found = found_fields.pop("format", None)
    if found != version:
        raise CalibrationError(f"format {found!r}, this version reads {version}: calibrate again")
    try:
        record = msgspec.convert(found_fields, kind)
    except msgspec.MsgspecError as error:
        raise CalibrationError(str(error)) from None
    written = _plain(record)
    for name, value in found_fields.items():
        if written.get(name) != value:
            raise CalibrationError(f"{name}: more or fewer fields than this version writes")
    return record


def _plain(record: Any) -> Any:
    """Return what is written of a record."""
    if not is_dataclass(record):
        return msgspec.to_builtins(record)
    return {
        field.name: _plain(value)
        for field in fields(record)
        if (value := getattr(record, field.name)) != field.default
    }


def parsed(data: bytes, kind: type[T]) -> T:
    """Read JSON of one type. Raises CalibrationError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CalibrationError(str(error)) from None
    except RecursionError:
        raise CalibrationError("it is nested too deeply") from None
