"""The row-tile planner's rates on a GPU, and how sure they are: fitted there or on another."""

from dataclasses import dataclass, replace

from sgl_prefix_attn.plan.costs import usual_rates
from sgl_prefix_attn.plan.row_tile_time import RowTileRates
from sgl_prefix_attn.predict.record import Calibration

_H100, _H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
_FITTED_SMS = 132


@dataclass(frozen=True)
class _Fits:
    """Rates by GPU; eval.row_tile_fit makes more. One without a fit takes the H100's with its own
    bandwidth: others of the chip with all of its multiprocessors (GH200) differ in memory; what has
    fewer (H20, H100 PCIe) has other clocks, too.

    judged  whether batches held out on each of them have shown how near both times come
            (eval.policy_holdout)
    """

    by_gpu: dict[str, RowTileRates]
    judged: bool


# Of eight head configurations each (eval/results/row_tile_fit_h100.json, row_tile_fit_h200.json).
_UP_TO_128 = _Fits(
    by_gpu={
        _H100: RowTileRates(),
        _H200: RowTileRates(
            wide=0.8266, narrow=0.6852, wide_masked=0.6768, narrow_masked=0.724, item=1.749,
            hbm=10.99e6, l2=187.4e6, fixed=3.775, split=1.746, part=0.07453, partial=1.326e6,
            overlap=1.035,
        ),
    },
    judged=True,
)  # fmt: skip
# Wider heads, where a block's softmax waits for its scores: head dim 256, five head configurations
# (eval/results/row_tile_fit_h100_256.json, row_tile_fit_h200_256.json).
_WIDER = _Fits(
    by_gpu={
        _H100: RowTileRates(
            wide=0.6206, narrow=0.432, wide_masked=0.4527, narrow_masked=0.5018, item=2.501,
            hbm=3.525e6, l2=17.42e6, fixed=5.101, split=1.492, part=0.05818, partial=1.348e6,
            overlap=1.259,
        ),
        _H200: RowTileRates(
            wide=0.6973, narrow=0.4845, wide_masked=0.523, narrow_masked=0.5648, item=2.396,
            hbm=4.49e6, l2=180.4e6, fixed=4.674, split=1.539, part=0.06473, partial=1.647e6,
            overlap=1.472,
        ),
    },
    judged=False,
)  # fmt: skip

# From the surest to the least sure, as step/policy.GAINS has them.
_SOURCES = ("judged", "measured", "shipped", "scaled", "conservative")


def row_tile_rates(calibration: Calibration) -> RowTileRates:
    """Return rates_of_gpu() of the calibration's GPU and heads."""
    key = calibration.key
    return rates_of_gpu(key.gpu, calibration.rates.bandwidth, key.heads.head_dim)


def rates_of_gpu(gpu: str, bandwidth: float, head_dim: int) -> RowTileRates:
    """Return the rates fitted on a GPU for such heads, or an H100's with its own `bandwidth` in
    bytes/us."""
    fits = _fits(head_dim)
    if gpu in fits.by_gpu:
        return fits.by_gpu[gpu]
    rates = fits.by_gpu[_H100]
    return replace(rates, hbm=rates.hbm * bandwidth / usual_rates(_H100).bandwidth)


def row_tile_source(calibration: Calibration) -> str:
    """Say how sure both predicted times are: "judged" where batches held out were, with stock
    kernels measured on this GPU with heads like these, otherwise the less sure of the two."""
    gpu, rates = calibration.key.gpu, "conservative"
    if calibration.num_sms == _FITTED_SMS:
        fits = _fits(calibration.key.heads.head_dim)
        fitted = "judged" if fits.judged else "measured"
        rates = fitted if gpu in fits.by_gpu else "scaled"
    if rates == "judged" and calibration.source in ("measured", "shipped"):
        return rates
    return max(calibration.source, rates, key=_SOURCES.index)


def _fits(head_dim: int) -> _Fits:
    return _UP_TO_128 if head_dim <= 128 else _WIDER
