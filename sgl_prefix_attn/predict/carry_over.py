"""The best calibration for a key that the shipped files allow, and how sure it is.

Rates and coefficients are fitted together, so they come from one file: of the same decode kernel of
FlashInfer before another, then of the same GPU before another.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from sgl_prefix_attn.plan.costs import usual_rates
from sgl_prefix_attn.plan.estimate import PREFIX_COEFFICIENTS, starts
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey
from sgl_prefix_attn.predict.stock_time import STOCK_COEFFICIENTS, stock_kernel
from sgl_prefix_attn.records import HeadConfig


def from_shipped(
    shipped: dict[Path, Calibration], key: CalibrationKey, num_sms: int
) -> tuple[Calibration, str]:
    """Return the best calibration that the shipped files allow, and a message that names it."""
    usable = {path: found for path, found in shipped.items() if found.key.kernels == key.kernels}
    here = [
        path
        for path, found in usable.items()
        if found.key.gpu == key.gpu and found.num_sms == num_sms
    ]
    if not here:
        of_h100 = {path: found for path, found in usable.items() if "H100" in found.key.gpu}
        like = _nearest(of_h100, key)
        what = f"conservative: nothing is measured on {key.gpu}"
        return _conservative(key, num_sms, usable[like] if like else None), what
    path = _nearest(usable, key)
    assert path is not None
    found, there = usable[path], usable[path].key
    what = f"{path.name} ({found.origin})"
    if path in here and replace(there, page_size=key.page_size) == key:
        pages = f", for pages of {there.page_size}" if there.page_size != key.page_size else ""
        return replace(found, key=key, source="shipped"), f"shipped: {what}{pages}"
    heads = there.heads
    what += f", for {heads.num_qo_heads}/{heads.num_kv_heads} heads of {heads.head_dim}"
    found = replace(found, key=key, num_sms=num_sms, samples=0, errors={})
    if path not in here:
        what += f" on {there.gpu}"
        ratio = usual_rates(key.gpu).bandwidth / usual_rates(there.gpu).bandwidth
        rates = replace(found.rates, bandwidth=found.rates.bandwidth * ratio)
        found = replace(found, rates=rates)
    if not _alike(heads, key.heads):
        return replace(found, source="conservative"), f"conservative: {what}"
    if path in here and there.dtype == key.dtype:
        return replace(found, source="shipped"), f"shipped: {what}"
    return replace(found, source="scaled"), f"scaled: {what}"


def _nearest(shipped: dict[Path, Calibration], key: CalibrationKey) -> Path | None:
    """Return the file whose key is the least unlike."""
    return min(shipped, key=lambda path: (_distance(shipped[path].key, key), path), default=None)


def _alike(one: HeadConfig, other: HeadConfig) -> bool:
    """Say whether times of one carry over to the other as they are (docs/calibration.md): of the
    same head dim and decode kernel of FlashInfer. On tensor cores any number of heads will do;
    without them each query head multiplies by itself, and more of them for each KV head are another
    case."""
    rows = stock_kernel(one).rows
    same = rows == stock_kernel(other).rows and one.head_dim == other.head_dim
    return same and (rows > 0 or one.group_size == other.group_size)


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
        not _alike(a, b),
        stock_kernel(a).rows != stock_kernel(b).rows,
        found.kv_bytes != key.kv_bytes,
        found.gpu != key.gpu,
        abs(math.log(a.head_dim / b.head_dim)),
        abs(math.log(a.group_size / b.group_size)),
        abs(math.log(a.num_kv_heads / b.num_kv_heads)),
        found.dtype != key.dtype,
        abs(math.log(found.page_size / key.page_size)),
    )
