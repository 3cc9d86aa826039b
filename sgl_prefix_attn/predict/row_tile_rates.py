"""The row-tile planner's rates on a GPU, and how sure they are: fitted there or on another."""

from dataclasses import replace

from sgl_prefix_attn.plan.costs import GPU_RATES
from sgl_prefix_attn.plan.row_tile_time import RowTileRates
from sgl_prefix_attn.predict.record import Calibration

# By name, head dims up to 128; eval.row_tile_fit makes more. Others of the chip with all of its
# multiprocessors (H200, GH200) differ in memory; what has fewer (H20, H100 PCIe) has other clocks.
_FITTED = {
    "NVIDIA H100 80GB HBM3": RowTileRates(),
    "NVIDIA H200": RowTileRates(  # eval/results/row_tile_fit_h200.json, eight head configurations
        wide=0.8266, narrow=0.6852, wide_masked=0.6768, narrow_masked=0.724, item=1.749,
        hbm=10.99e6, l2=187.4e6, fixed=3.775, split=1.746, part=0.07453, partial=1.326e6,
        overlap=1.035,
    ),
}  # fmt: skip
# Wider heads, where a block's softmax waits for its scores: fitted to head dim 256
# (eval/results/row_tile_fit_h200_256.json, five head configurations).
_WIDE_FITTED_ON = "NVIDIA H200"
_WIDE = RowTileRates(
    wide=0.6973, narrow=0.4845, wide_masked=0.523, narrow_masked=0.5648, item=2.396,
    hbm=4.49e6, l2=180.4e6, fixed=4.674, split=1.539, part=0.06473, partial=1.647e6,
    overlap=1.472,
)  # fmt: skip
_NARROW = 128
_FITTED_SMS = 132
# Where batches held out have shown how near both times come (eval.policy_holdout), for head dims
# up to 128. An H100's rates are fitted to trees alone.
_JUDGED = frozenset({"NVIDIA H200"})

# From the surest to the least sure, as step/policy.GAINS has them.
_SOURCES = ("judged", "measured", "shipped", "scaled", "conservative")


def row_tile_rates(calibration: Calibration) -> RowTileRates:
    """Return rates_of_gpu() of the calibration's GPU and heads."""
    key = calibration.key
    return rates_of_gpu(key.gpu, calibration.rates.bandwidth, key.heads.head_dim)


def rates_of_gpu(gpu: str, bandwidth: float, head_dim: int) -> RowTileRates:
    """Return the rates fitted on a GPU for such heads, or another one's with this one's
    `bandwidth` in bytes/us: an H100's, of heads wider than 128 an H200's."""
    if head_dim > _NARROW:
        return _WIDE if gpu == _WIDE_FITTED_ON else _scaled(_WIDE, "H200", bandwidth)
    return _FITTED[gpu] if gpu in _FITTED else _scaled(RowTileRates(), "H100", bandwidth)


def _scaled(rates: RowTileRates, fitted_on: str, bandwidth: float) -> RowTileRates:
    return replace(rates, hbm=rates.hbm * bandwidth / GPU_RATES[fitted_on].bandwidth)


def row_tile_source(calibration: Calibration) -> str:
    """Say how sure both predicted times are: "judged" where batches held out were, with stock
    kernels measured on this GPU with heads like these, otherwise the less sure of the two."""
    gpu, rates = calibration.key.gpu, "conservative"
    wide = calibration.key.heads.head_dim > _NARROW
    if calibration.num_sms == _FITTED_SMS:
        fitted = gpu == _WIDE_FITTED_ON if wide else gpu in _FITTED
        rates = "measured" if fitted else "scaled"
        if gpu in _JUDGED and not wide:
            rates = "judged"
    if rates == "judged" and calibration.source in ("measured", "shipped"):
        return rates
    return max(calibration.source, rates, key=_SOURCES.index)
