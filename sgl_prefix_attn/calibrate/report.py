"""What a calibration is worth, in words."""

import numpy as np

from sgl_prefix_attn.calibrate.fit import log_rms
from sgl_prefix_attn.calibrate.procedure import HeldOut, Measured
from sgl_prefix_attn.records import PREFIX, Prediction
from sgl_prefix_attn.step.policy import BatchFacts, decide


def lines(measured: Measured, held_out: HeldOut) -> list[str]:
    """Tell the errors of both models and what the policy makes of them, on batches unseen by the
    fit."""
    stock, prefix = measured.stock_us, measured.prefix_us
    prefers = policy_choice(measured, held_out)
    chosen = np.where(prefers, prefix, stock)
    best = np.minimum(stock, prefix)
    return [
        _error("stock", held_out.stock_us, stock),
        _error("prefix", held_out.prefix_us, prefix),
        f"the policy runs prefix kernels in {prefers.sum()} of {best.size} batches; "
        f"they are faster in {(prefix < stock).sum()}",
        "time over that of the faster kernels: "
        f"policy {_ratio(chosen / best)}; always stock {_ratio(stock / best)}; "
        f"always prefix {_ratio(prefix / best)}",
    ]


def policy_choice(measured: Measured, held_out: HeldOut) -> np.ndarray:
    """Return bool [n]: whether the policy runs prefix kernels, each batch as if the first."""
    decisions = [
        decide(BatchFacts(predicted=Prediction(*us), shares=batch.shared_share > 0))
        for batch, *us in zip(measured.batches, held_out.stock_us, held_out.prefix_us, strict=True)
    ]
    return np.array([decision.variant == PREFIX for decision in decisions])


def _error(name: str, predicted: np.ndarray, us: np.ndarray) -> str:
    worst = np.abs(predicted / us - 1).max()
    return f"{name}: predictions err by {log_rms(predicted, us):.1%}, at worst {worst:.0%}"


def _ratio(ratio: np.ndarray) -> str:
    return f"{np.exp(np.log(ratio).mean()):.4f} on average, {ratio.max():.3f} at worst"
