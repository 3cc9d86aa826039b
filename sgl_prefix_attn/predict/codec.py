"""Calibration <-> JSON bytes. Nothing that does not check is ever returned."""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import date
from typing import Any

import numpy as np
import orjson

from sgl_prefix_attn.plan.costs import GpuRates
from sgl_prefix_attn.plan.estimate import PREFIX_COEFFICIENTS
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey, Origin
from sgl_prefix_attn.predict.stock_work import StockWork
from sgl_prefix_attn.predict.time_model import (
    ANY_PLAN,
    STOCK_COEFFICIENTS,
    Correction,
    TimeModel,
    prefix_features,
    stock_features,
)
from sgl_prefix_attn.records import HeadConfig

FORMAT = 2
MODELS = ("stock", "prefix")
SOURCES = ("measured", "shipped", "scaled", "conservative")
DTYPES = ("bfloat16", "float16", "float32")
_COEFFICIENTS = {"stock": STOCK_COEFFICIENTS, "prefix": PREFIX_COEFFICIENTS}
FEATURES = {
    "stock": stock_features(StockWork(1, 1, 1, 1, 1, 1.0), 1.0).size,
    "prefix": prefix_features(ANY_PLAN, 1.0).size,
}


class CalibrationError(ValueError):
    """A calibration, or the samples for one, that cannot be used; the message says why."""


def encode(calibration: Calibration) -> bytes:
    """JSON; every float reads back as the same float. CalibrationError: it does not add up."""
    fields = {
        "format": FORMAT,
        "key": key_to_json(calibration.key),
        "versions": calibration.versions,
        "num_sms": calibration.num_sms,
        "rates": asdict(calibration.rates),
        "stock": _model_to_json("stock", calibration.stock),
        "prefix": _model_to_json("prefix", calibration.prefix),
        "samples": calibration.samples,
        "errors": calibration.errors,
        "origin": None if calibration.origin is None else asdict(calibration.origin),
        "source": calibration.source,
    }
    data = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    decode(data)
    return data


def decode(data: bytes) -> Calibration:
    """Raises CalibrationError that says what is wrong with the data."""
    fields = read_json(data)
    found = fields.get("format")
    if found != FORMAT:
        raise CalibrationError(f"format {found!r}, this version reads {FORMAT}")
    try:
        calibration = Calibration(
            key=key_from_json(fields["key"]),
            versions=versions_from_json(fields["versions"]),
            num_sms=_count("num_sms", fields["num_sms"]),
            rates=rates_from_json(fields["rates"]),
            stock=_model_from_json("stock", fields["stock"]),
            prefix=_model_from_json("prefix", fields["prefix"]),
            samples=_count("samples", fields["samples"], 0),
            errors=_errors(fields["errors"]),
            origin=None if fields["origin"] is None else _origin(fields["origin"]),
            source=_one_of("source", fields["source"], SOURCES),
        )
    except KeyError as error:
        raise CalibrationError(f"{error.args[0]} is missing") from None
    except (TypeError, AttributeError) as error:
        raise CalibrationError(f"a value of a wrong type: {error}") from None
    if bool(calibration.samples) != bool(calibration.errors):
        raise CalibrationError(
            f"{calibration.samples} samples do not go with errors {calibration.errors}"
        )
    if calibration.samples and calibration.origin is None:
        raise CalibrationError(f"{calibration.samples} samples without an origin")
    return calibration


def read_json(data: bytes) -> dict[str, Any]:
    """Raises CalibrationError unless the data is one JSON object."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CalibrationError(f"truncated or no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CalibrationError("no JSON object")
    return fields


def key_to_json(key: CalibrationKey) -> dict[str, Any]:
    return {
        "gpu": key.gpu,
        **asdict(key.heads),
        "dtype": key.dtype,
        "page_size": key.page_size,
    }


def key_from_json(fields: dict[str, Any]) -> CalibrationKey:
    if not (isinstance(fields["gpu"], str) and fields["gpu"]):
        raise CalibrationError(f"gpu must be a name, got {fields['gpu']!r}")
    try:
        heads = HeadConfig(fields["num_qo_heads"], fields["num_kv_heads"], fields["head_dim"])
    except ValueError as error:
        raise CalibrationError(str(error)) from None
    return CalibrationKey(
        gpu=fields["gpu"],
        heads=heads,
        dtype=_one_of("dtype", fields["dtype"], DTYPES),
        page_size=_count("page_size", fields["page_size"]),
    )


def versions_from_json(fields: dict[str, Any]) -> dict[str, str]:
    if not all(isinstance(version, str) for version in fields.values()):
        raise CalibrationError("versions must be strings")
    return dict(fields)


def rates_from_json(fields: dict[str, Any]) -> GpuRates:
    try:
        return GpuRates(**fields)
    except (TypeError, ValueError) as error:
        raise CalibrationError(f"rates: {error}") from None


def date_from_json(value: Any) -> str:
    try:
        found = date.fromisoformat(value).isoformat()
    except (TypeError, ValueError):
        found = None
    if found is None or found != value:  # some versions of Python read other spellings too
        raise CalibrationError(f"date must be like 2026-11-21, got {value!r}")
    return value


def _origin(fields: dict[str, Any]) -> Origin:
    return Origin(
        seed=_count("seed", fields["seed"], 0),
        batches=_count("batches", fields["batches"]),
        pool_tokens=_count("pool_tokens", fields["pool_tokens"]),
        date=date_from_json(fields["date"]),
    )


def _errors(fields: dict[str, Any]) -> dict[str, float]:
    """Of both models, or of none where nothing was measured for these heads."""
    if list(fields) not in ([], list(MODELS)):
        raise CalibrationError(f"errors of {list(fields)}, not of {list(MODELS)}")
    errors = {name: _finite(f"error of {name}", value) for name, value in fields.items()}
    if any(error < 0 for error in errors.values()):
        raise CalibrationError(f"negative errors: {errors}")
    return errors


def _model_to_json(name: str, model: TimeModel) -> dict[str, Any]:
    names = [coefficient[0] for coefficient in _COEFFICIENTS[name]]
    if len(names) != len(model.coefficients):
        raise CalibrationError(f"{name}: {len(model.coefficients)} coefficients, not {len(names)}")
    return {
        "coefficients": dict(zip(names, model.coefficients, strict=True)),
        "correction": None if model.correction is None else vars(model.correction),
    }


def _model_from_json(name: str, fields: dict[str, Any]) -> TimeModel:
    wanted, given = _COEFFICIENTS[name], fields["coefficients"]
    if list(given) != [coefficient[0] for coefficient in wanted]:
        raise CalibrationError(f"{name}: coefficients {list(given)} are not this version's")
    for coefficient, _, low, high in wanted:
        value = _finite(f"{name} {coefficient}", given[coefficient])
        if not low <= value <= high:
            raise CalibrationError(f"{name} {coefficient} = {value} is not in {low} to {high}")
    correction = fields["correction"]
    return TimeModel(
        tuple(float(value) for value in given.values()),
        None if correction is None else _correction(name, correction),
    )


def _correction(name: str, fields: dict[str, Any]) -> Correction:
    features, centres = FEATURES[name], len(fields["weights"])
    shapes = {
        "offset": (features,),
        "scale": (features,),
        "centres": (centres, features),
        "weights": (centres,),
    }
    arrays = {}
    for field, shape in shapes.items():
        try:
            arrays[field] = np.array(fields[field], np.float64)
        except (TypeError, ValueError):  # text, or rows of unequal length
            raise CalibrationError(f"{name} correction: {field} is no array of numbers") from None
        if arrays[field].shape != shape:
            raise CalibrationError(
                f"{name} correction: {field} has shape {arrays[field].shape}, not {shape}"
            )
        if not np.isfinite(arrays[field]).all():
            raise CalibrationError(f"{name} correction: {field} is not finite")
    if not (arrays["scale"] > 0).all():
        raise CalibrationError(f"{name} correction: scale must be positive")
    return Correction(**arrays)


def _finite(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CalibrationError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _count(name: str, value, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CalibrationError(f"{name} must be an integer >= {least}, got {value!r}")
    return value


def _one_of(name: str, value, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise CalibrationError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value
