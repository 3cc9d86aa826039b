"""The best calibration for a key that the shipped files allow, and how sure it is.

The fallback's bandwidth and coefficients are fitted together, so they come from one file of it: of
the same decode kernel before another, then of the same head dim, then of the same GPU. Rates of our
kernels hold for many heads, whatever was measured beside them: they come from a file of the same
GPU and family, of equal ones from that of the same fallback.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import get_args

from sgl_prefix_attn.predict.bandwidths import usual_bandwidth
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey, Source, rates_of
from sgl_prefix_attn.predict.stock_time import StockKernel, stock_kernel, stock_start
from sgl_prefix_attn.records import FLASHINFER, HeadConfig

# From the surest to the least sure, as step/policy.GAINS has them.
_SOURCES: tuple[Source, ...] = get_args(Source)
_H100 = "NVIDIA H100 80GB HBM3"  # on which those of rates_of are fitted
_FITTED_BYTES = 2  # of an element of the KV that they are fitted to
_BLOCK_RATES = ("wide", "narrow", "wide_masked", "narrow_masked")
# Up to this head dim a block's softmax does not wait for its scores, so that rates are others.
_NARROW = 128


def from_shipped(
    shipped: dict[Path, Calibration], key: CalibrationKey, num_sms: int
) -> tuple[Calibration, str]:
    """Return the best calibration that the shipped files allow, and a message that names it.

    Its source is the less certain one of the fallback's coefficients and our kernels' rates.
    """
    usable = {path: found for path, found in shipped.items() if found.key.kernels == key.kernels}
    found, what = _stock(usable, key, num_sms)
    rates, source = _rates(usable.values(), key, num_sms, found.bandwidth)
    if _SOURCES.index(source) > _SOURCES.index(found.source):
        found = replace(found, source=source)
        what += f", {key.family} kernels by rates of an H100"
    return replace(found, rates=rates), f"{found.source}: {what}"


def _stock(
    usable: dict[Path, Calibration], key: CalibrationKey, num_sms: int
) -> tuple[Calibration, str]:
    """Return the best bandwidth and coefficients, how sure they are, and which file they are of."""
    usable = {
        path: found
        for path, found in usable.items()
        if found.key.fallback == key.fallback and _is_latent(found.key) == _is_latent(key)
    }
    here = [
        path
        for path, found in usable.items()
        if found.key.gpu == key.gpu and found.num_sms == num_sms
    ]
    if not here:
        like = _nearest({p: found for p, found in usable.items() if "H100" in found.key.gpu}, key)
        beside = "" if key.fallback == FLASHINFER else f" of {key.fallback}"
        what = f"nothing{beside} is measured on {key.gpu}"
        return _conservative(key, num_sms, usable[like] if like else None), what
    path = _nearest(usable, key)
    assert path is not None
    found, there = usable[path], usable[path].key
    what = f"{path.name} ({found.origin})"
    own = _as_shipped(found)
    if path in here and replace(there, page_size=key.page_size, family=key.family) == key:
        pages = f", for pages of {there.page_size}" if there.page_size != key.page_size else ""
        return replace(found, key=key, source=own), f"{what}{pages}"
    heads = there.heads
    what += f", for {heads}"
    stock = _coefficients(found, key)
    found = replace(found, key=key, num_sms=num_sms, stock=stock, samples=0, errors={})
    if path not in here:
        what += f" on {there.gpu}"
        ratio = usual_bandwidth(key.gpu) / usual_bandwidth(there.gpu)
        found = replace(found, bandwidth=found.bandwidth * ratio)
    if not _alike(there, key):
        return replace(found, source="conservative"), what
    if path in here and there.dtype == key.dtype:
        return replace(found, source=own), what
    return replace(found, source="scaled"), what


def _rates(
    usable: Iterable[Calibration], key: CalibrationKey, num_sms: int, bandwidth: float
) -> tuple[dict[str, float], Source]:
    """Return the rates fitted to the family's kernels on this GPU and how sure they are; without
    any an H100's, with this GPU's own `bandwidth` in bytes/us."""
    fitted = [
        found
        for found in usable
        if found.key.family == key.family and _rates_alike(found.key.heads, key.heads)
    ]
    fitted.sort(key=lambda found: _rates_distance(found.key, key))
    here = [found for found in fitted if (found.key.gpu, found.num_sms) == (key.gpu, num_sms)]
    if here:
        best = here[0]
        rates = _for_dim_of(best, key)
        if best.key.kv_bytes != key.kv_bytes:
            return _for_kv_of(rates, best.key.kv_bytes, key), "scaled"
        return rates, "scaled" if rates != best.rates else _as_shipped(best)
    rates = _for_kv_of(dict(vars(rates_of(key.family, key.heads)())), _FITTED_BYTES, key)
    # Of e4m3 they hold together, and not beside another memory.
    usual = [found for found in fitted if found.key.kv_bytes == _FITTED_BYTES]
    if there := next((found for found in usual if found.key.gpu == _H100), None):
        rates = _for_kv_of(there.rates, there.key.kv_bytes, key)
    if key.gpu == _H100:
        return rates, "scaled"
    return rates | {"hbm": rates["hbm"] * bandwidth / usual_bandwidth(_H100)}, "conservative"


def _as_shipped(found: Calibration) -> Source:
    return "shipped" if found.source == "measured" else found.source


def _is_latent(key: CalibrationKey) -> bool:
    return key.heads.latent_dim is not None


def _rates_alike(one: HeadConfig, other: HeadConfig) -> bool:
    """Say whether a family's kernels reach the same rates for both."""
    if one.latent_dim or other.latent_dim:
        return (one.head_dim, one.latent_dim) == (other.head_dim, other.latent_dim)
    return (one.head_dim <= _NARROW) == (other.head_dim <= _NARROW)


def _for_dim_of(found: Calibration, key: CalibrationKey) -> dict[str, float]:
    """Turn rates into those of the key's head dim: half of a block's time is as long whatever its
    dimensions (kernel_h200_64.json has 0.6 to 0.8 of the time for half of them), and KernelRates
    counts it by its dimensions."""
    ratio = (1 + max(1.0, found.key.heads.head_dim / key.heads.head_dim)) / 2
    return found.rates | {name: found.rates[name] * ratio for name in _BLOCK_RATES}


def _for_kv_of(rates: dict[str, float], kv_bytes: int, key: CalibrationKey) -> dict[str, float]:
    """Turn rates that were fitted to elements of kv_bytes into those of the key's KV: they count
    every element as two bytes (KernelRates), of which memory then gives so many more or fewer."""
    ratio = kv_bytes / key.kv_bytes
    return rates | {name: rates[name] * ratio for name in ("hbm", "l2")}


def _nearest(shipped: dict[Path, Calibration], key: CalibrationKey) -> Path | None:
    """Return the file whose key is the least unlike."""
    return min(shipped, key=lambda path: (_distance(shipped[path].key, key), path), default=None)


def _alike(found: CalibrationKey, key: CalibrationKey) -> bool:
    """Say whether times of one carry over to the other as they are (docs/calibration.md): of the
    same head dim and decode kernel of the fallback. On tensor cores any number of heads will do;
    without them each query head multiplies by itself, and more of them for each KV head are another
    case."""
    dims = [(one.heads.head_dim, one.heads.latent_dim) for one in (found, key)]
    rows = _stock_kernel(key).rows
    same = _stock_kernel(found).rows == rows and dims[0] == dims[1]
    return same and (rows > 0 or found.heads.group_size == key.heads.group_size)


def _stock_kernel(key: CalibrationKey) -> StockKernel:
    return stock_kernel(key.heads, key.fallback, key.kv_bytes)


def _coefficients(like: Calibration | None, key: CalibrationKey) -> dict[str, float]:
    """Return those of a fit, unless there is none or its kernel is another: one converts e4m3."""
    if like is not None and (like.key.kv_bytes == 1) == (key.kv_bytes == 1):
        return like.stock
    return stock_start(key.heads, key.fallback, key.kv_bytes)


def _conservative(key: CalibrationKey, num_sms: int, like: Calibration | None) -> Calibration:
    """Make one for a GPU of which only the name is known; `like`, of another GPU, gives the
    coefficients."""
    return Calibration(
        key=key,
        versions={},
        num_sms=num_sms,
        bandwidth=usual_bandwidth(key.gpu),
        stock=_coefficients(like, key),
        rates=dict(vars(rates_of(key.family, key.heads)())),
        samples=0,
        errors={},
        origin=None,
        source="conservative",
    )


def _distance(found: CalibrationKey, key: CalibrationKey) -> tuple:
    """Say how unlike two keys are for the fallback, what matters most first."""
    there, here = _stock_kernel(found), _stock_kernel(key)
    return (
        not _alike(found, key),
        (there.rows, there.ctas) != (here.rows, here.ctas),
        found.kv_bytes != key.kv_bytes,
        found.heads.head_dim != key.heads.head_dim,
        *_rates_distance(found, key),
    )


def _rates_distance(found: CalibrationKey, key: CalibrationKey) -> tuple:
    """Say how unlike they are for our kernels."""
    a, b = found.heads, key.heads
    return (
        found.kv_bytes != key.kv_bytes,
        found.gpu != key.gpu,
        abs(math.log(a.head_dim / b.head_dim)),
        abs(math.log(a.group_size / b.group_size)),
        abs(math.log(a.num_kv_heads / b.num_kv_heads)),
        found.dtype != key.dtype,
        found.family != key.family,
        abs(math.log(found.page_size / key.page_size)),
        found.fallback != key.fallback,
    )
