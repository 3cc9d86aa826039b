"""The row-tile planner's rates on a GPU, and how sure they are: fitted there or on another."""

from dataclasses import replace

from sgl_prefix_attn.plan.costs import GPU_RATES
from sgl_prefix_attn.plan.row_tile_time import RowTileRates
from sgl_prefix_attn.predict.record import Calibration

# By name; eval.row_tile_fit makes more. Others of the chip with all of its multiprocessors (H200,
# GH200) differ in memory; what has fewer (H20, H100 PCIe) has other clocks, too.
_FITTED = {
    "NVIDIA H100 80GB HBM3": RowTileRates(),
    "NVIDIA H200": RowTileRates(  # eval/results/row_tile_fit_h200.json, eight head configurations
        wide=0.8266, narrow=0.6852, wide_masked=0.6768, narrow_masked=0.724, item=1.749,
        hbm=10.99e6, l2=187.4e6, fixed=3.775, split=1.746, part=0.07453, partial=1.326e6,
        overlap=1.035,
    ),
}  # fmt: skip
_FITTED_SMS = 132
# Where batches held out have shown how near both times come (eval.policy_holdout). An H100's rates
# are fitted to trees alone.
_JUDGED = frozenset({"NVIDIA H200"})

# From the surest to the least sure, as step/policy.GAINS has them.
_SOURCES = ("judged", "measured", "shipped", "scaled", "conservative")


def row_tile_rates(calibration: Calibration) -> RowTileRates:
    """Return the rates fitted on the calibration's GPU, or an H100's with its bandwidth."""
    return rates_of_gpu(calibration.key.gpu, calibration.rates.bandwidth)


def rates_of_gpu(gpu: str, bandwidth: float) -> RowTileRates:
    """Return the rates fitted on a GPU, or an H100's with this one's `bandwidth` in bytes/us."""
    if gpu in _FITTED:
        return _FITTED[gpu]
    rates = RowTileRates()
    return replace(rates, hbm=rates.hbm * bandwidth / GPU_RATES["H100"].bandwidth)


def row_tile_source(calibration: Calibration) -> str:
    """Say how sure both predicted times are: "judged" where batches held out were, with stock
    kernels measured on this GPU with heads like these, otherwise the less sure of the two."""
    gpu, rates = calibration.key.gpu, "conservative"
    if calibration.num_sms == _FITTED_SMS:
        rates = "judged" if gpu in _JUDGED else "measured" if gpu in _FITTED else "scaled"
    if rates == "judged" and calibration.source in ("measured", "shipped"):
        return rates
    return max(calibration.source, rates, key=_SOURCES.index)
