"""What a calibration is worth, in words."""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.calibration.fit import log_rms
from sgl_prefix_attn.calibration.run import HeldOut, Measured


def lines(measured: Measured, held_out: HeldOut) -> list[str]:
    """Errors of both models and what choosing by them costs, all on batches unseen by the fit."""
    stock, prefix = measured.stock_us, measured.prefix_us
    best = np.minimum(stock, prefix)
    chosen = held_out.prefix_us < held_out.stock_us
    regret = np.where(chosen, prefix, stock) / best
    return [
        f"{name}: predictions err by {log_rms(predicted, us):.1%} "
        f"(worst {np.abs(predicted / us - 1).max():.0%})"
        for name, predicted, us in (
            ("stock", held_out.stock_us, stock),
            ("prefix", held_out.prefix_us, prefix),
        )
    ] + [
        f"choosing the kernel predicted to be faster: prefix in {chosen.sum()} of {len(best)} "
        f"batches (it is faster in {(prefix < stock).sum()}); time over the faster kernel's: "
        f"{np.exp(np.log(regret).mean()):.4f} on average, {regret.max():.3f} at worst",
        f"always stock: {_average(stock / best)}, always prefix: {_average(prefix / best)}",
    ]


def _average(ratio: np.ndarray) -> str:
    return f"{np.exp(np.log(ratio).mean()):.3f} on average, {ratio.max():.2f} at worst"
