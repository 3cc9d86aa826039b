"""Calibration <-> JSON bytes. Nothing that does not check is ever returned."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from sgl_prefix_attn.predict.record import Calibration

FORMAT = 3
T = TypeVar("T")


class CalibrationError(ValueError):
    """A calibration, or the samples for one, that cannot be used; the message says why."""


def encode(calibration: Calibration) -> bytes:
    """Write JSON from which every float reads back as the same float.

    Raises CalibrationError for what decode would refuse, such as a time that is not finite.
    """
    data = msgspec.json.encode({"format": FORMAT, **msgspec.to_builtins(calibration)})
    decode(data)
    return data


def decode(data: bytes) -> Calibration:
    """Read what encode wrote, or version 0.1.2.

    Raises CalibrationError that says what is wrong with the data.
    """
    fields = parsed(data, dict[str, Any])
    found = fields.pop("format", None)
    if found == 2:
        fields = _from_format_2(fields)
    elif found != FORMAT:
        raise CalibrationError(f"format {found!r}, this version reads 2 and {FORMAT}")
    calibration = converted(fields, Calibration)
    check_complete(fields, calibration)
    return calibration


def parsed(data: bytes, kind: type[T]) -> T:
    """Read JSON of one type. Raises CalibrationError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CalibrationError(str(error)) from None


def converted(fields: Any, kind: type[T]) -> T:
    """Check parsed JSON against a type. Raises CalibrationError that names the first bad field."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.MsgspecError as error:
        raise CalibrationError(str(error)) from None


def check_complete(fields: dict[str, Any], *records: object) -> None:
    """Raise CalibrationError if what the records were converted from had more fields, or fewer."""
    written: dict[str, Any] = {}
    for record in records:
        written |= msgspec.to_builtins(record)
    for name, value in fields.items():
        if written.get(name) != value:
            raise CalibrationError(f"{name}: more or fewer fields than this version writes")


def _from_format_2(fields: dict[str, Any]) -> dict[str, Any]:
    """Return today's fields of a file of version 0.1.2. Its models had a correction, which is
    dropped, and its errors with it; the other coefficients stay, and what 0.1.2 did not know counts
    nothing."""
    try:
        version = fields["versions"]["sgl-prefix-attn"]
        stock, prefix = (dict(fields[name]["coefficients"]) for name in ("stock", "prefix"))
        norm = prefix.pop("norm")
        models = {"stock": stock, "prefix": prefix | {"both": 0.0, "norm": norm}}
        today = fields | models | {"key": key_of_0_1_2(fields["key"]), "errors": {}}
    except (KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"no file of version 0.1.2: {error!r}") from None
    if version != "0.1.2":
        raise CalibrationError(f"format 2 is read of version 0.1.2 only, this is of {version}")
    return today


def key_of_0_1_2(key: dict[str, Any]) -> dict[str, Any]:
    """Return today's fields of a key that was written flat, without a revision: that was 1."""
    heads = ("num_qo_heads", "num_kv_heads", "head_dim")
    flat = {name: value for name, value in key.items() if name not in heads}
    return flat | {"heads": {name: key[name] for name in heads if name in key}, "kernels": 1}
