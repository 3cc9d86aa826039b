"""What to do without a calibration for a GPU, and which of several is nearest."""

from __future__ import annotations

import math

from sgl_prefix_attn.plan.costs import GPU_RATES, known_rates
from sgl_prefix_attn.plan.estimate import PREFIX_COEFFICIENTS
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey
from sgl_prefix_attn.predict.stock_time import STOCK_COEFFICIENTS


def conservative(key: CalibrationKey, num_sms: int, like: Calibration | None) -> Calibration:
    """Derive one for a GPU that nothing is known about but its name; `like`, of another GPU, gives
    the coefficients."""
    return Calibration(
        key=key,
        versions={},
        num_sms=num_sms,
        rates=known_rates(key.gpu) or GPU_RATES["other"],
        stock=like.stock if like else named_starts(STOCK_COEFFICIENTS),
        prefix=like.prefix if like else named_starts(PREFIX_COEFFICIENTS),
        samples=0,
        errors={},
        origin=None,
        source="conservative",
    )


def named_starts(table: tuple) -> dict[str, float]:
    """Return the starts of a table such as STOCK_COEFFICIENTS by name."""
    return {name: start for name, start, *_ in table}


def distance(found: CalibrationKey, key: CalibrationKey) -> tuple:
    """Say how unlike two keys are, what matters most first."""
    a, b = found.heads, key.heads
    return (
        found.kv_bytes != key.kv_bytes,
        abs(math.log(a.head_dim / b.head_dim)),
        abs(math.log(a.group_size / b.group_size)),
        abs(math.log(a.num_kv_heads / b.num_kv_heads)),
        found.dtype != key.dtype,
        abs(math.log(found.page_size / key.page_size)),
    )
