"""The row-tile planner's rates on a GPU, and how sure they are: fitted there or on another."""

from dataclasses import replace

from sgl_prefix_attn.plan.costs import GPU_RATES
from sgl_prefix_attn.plan.row_tile_time import RowTileRates
from sgl_prefix_attn.predict.record import Calibration

# By name; eval.row_tile_fit makes more. Others of the chip with all of its multiprocessors (H200,
# GH200) differ in memory; what has fewer (H20, H100 PCIe) has other clocks, too.
_FITTED = {"NVIDIA H100 80GB HBM3": RowTileRates()}
_FITTED_SMS = 132

# From the surest to the least sure, as step/policy.GAINS has them.
_SOURCES = ("measured", "shipped", "scaled", "conservative")


def row_tile_rates(calibration: Calibration) -> RowTileRates:
    """Return the rates fitted on the calibration's GPU, or an H100's with its bandwidth."""
    if calibration.key.gpu in _FITTED:
        return _FITTED[calibration.key.gpu]
    rates = RowTileRates()
    return replace(rates, hbm=rates.hbm * calibration.rates.bandwidth / GPU_RATES["H100"].bandwidth)


def row_tile_source(calibration: Calibration) -> str:
    """Say how sure both predicted times are, as Calibration.source does: of the two the less."""
    rates = "conservative"
    if calibration.num_sms == _FITTED_SMS:
        rates = "measured" if calibration.key.gpu in _FITTED else "scaled"
    return max(calibration.source, rates, key=_SOURCES.index)
