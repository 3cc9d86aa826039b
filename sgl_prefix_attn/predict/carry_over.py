"""The best calibration for a key that the shipped files make, and how sure it is."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

from sgl_prefix_attn.plan.costs import usual_rates
from sgl_prefix_attn.plan.estimate import PREFIX_COEFFICIENTS, starts
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey
from sgl_prefix_attn.predict.stock_time import STOCK_COEFFICIENTS, on_tensor_cores
from sgl_prefix_attn.records import HeadConfig


def from_shipped(
    shipped: dict[Path, Calibration], key: CalibrationKey, num_sms: int
) -> tuple[Calibration, str]:
    """Make the best of the shipped files, and say of what."""
    of_gpu = [
        path
        for path, found in shipped.items()
        if (found.key.gpu, found.key.kernels, found.num_sms) == (key.gpu, key.kernels, num_sms)
    ]
    if not of_gpu:
        of_h100 = [path for path, found in shipped.items() if "H100" in found.key.gpu]
        like = _nearest(of_h100, shipped, key)
        what = f"conservative: nothing is measured on {key.gpu}"
        return _conservative(key, num_sms, shipped[like] if like else None), what
    path = _nearest(of_gpu, shipped, key)
    assert path is not None
    found, there = shipped[path], shipped[path].key
    what = f"{path.name} ({found.origin})"
    if replace(there, page_size=key.page_size) == key:
        pages = f", for pages of {there.page_size}" if there.page_size != key.page_size else ""
        return replace(found, key=key, source="shipped"), f"shipped: {what}{pages}"
    heads = there.heads
    what += f", for {heads.num_qo_heads}/{heads.num_kv_heads} heads of {heads.head_dim}"
    source: Literal["shipped", "scaled", "conservative"] = "scaled"
    if _alike(heads, key.heads):
        source = "shipped" if there.dtype == key.dtype else "scaled"
    else:
        elsewhere = [path for path in shipped if _alike(shipped[path].key.heads, key.heads)]
        like = _nearest(elsewhere, shipped, key)
        if like:
            found = replace(found, stock=shipped[like].stock, prefix=shipped[like].prefix)
            what += f", with the coefficients of {like.name}"
        elif heads.head_dim != key.heads.head_dim:
            source = "conservative"
    carried = replace(found, key=key, samples=0, errors={}, source=source)
    return carried, f"{source}: {what}"


def _nearest(
    paths: list[Path], shipped: dict[Path, Calibration], key: CalibrationKey
) -> Path | None:
    """The file whose key is the least unlike."""
    return min(paths, key=lambda path: (_distance(shipped[path].key, key), path), default=None)


def _alike(one: HeadConfig, other: HeadConfig) -> bool:
    """Whether times of one carry over to the other as they are (docs/calibration.md): of the same
    head dim, where FlashInfer decodes both on tensor cores. Without them it multiplies for every
    query head by itself: more of them for each KV head are another case."""
    if one.head_dim != other.head_dim:
        return False
    both_on_tensor_cores = on_tensor_cores(one) and on_tensor_cores(other)
    return both_on_tensor_cores or one.group_size == other.group_size


def _conservative(key: CalibrationKey, num_sms: int, like: Calibration | None) -> Calibration:
    """Make one for a GPU of which only the name is known; `like`, of another GPU, gives the
    coefficients."""
    return Calibration(
        key=key,
        versions={},
        num_sms=num_sms,
        rates=usual_rates(key.gpu),
        stock=like.stock if like else starts(STOCK_COEFFICIENTS),
        prefix=like.prefix if like else starts(PREFIX_COEFFICIENTS),
        samples=0,
        errors={},
        origin=None,
        source="conservative",
    )


def _distance(found: CalibrationKey, key: CalibrationKey) -> tuple:
    """Say how unlike two keys are, what matters most first."""
    a, b = found.heads, key.heads
    return (
        found.kv_bytes != key.kv_bytes,
        abs(math.log(a.head_dim / b.head_dim)),
        on_tensor_cores(a) != on_tensor_cores(b),
        abs(math.log(a.group_size / b.group_size)),
        abs(math.log(a.num_kv_heads / b.num_kv_heads)),
        found.dtype != key.dtype,
        abs(math.log(found.page_size / key.page_size)),
    )
