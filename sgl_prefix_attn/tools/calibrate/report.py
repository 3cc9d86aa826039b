"""What a calibration is worth, in words."""

import numpy as np

from sgl_prefix_attn.records import PREFIX, Prediction
from sgl_prefix_attn.step.policy import BatchFacts, decide
from sgl_prefix_attn.tools.calibrate.fit import log_rms
from sgl_prefix_attn.tools.calibrate.procedure import HeldOut, Measured


def lines(measured: Measured, held_out: HeldOut) -> list[str]:
    """Tell the errors of both models, what the cuts that they pick cost, and what the policy makes
    of both, on batches unseen by the fits."""
    stock, prefix = measured.stock_us, picked(held_out.cut_us, measured.cut_us)
    fastest = np.array([us.min() for us in measured.cut_us])
    prefers = policy_choice(measured, held_out)
    chosen = np.where(prefers, prefix, stock)
    best = np.minimum(stock, prefix)
    cut_us = np.concatenate(held_out.cut_us), np.concatenate(measured.cut_us)
    return [
        _error("stock", held_out.stock_us, stock),
        _error(f"prefix, {cut_us[0].size} cuts", *cut_us),
        f"cut picked over the fastest cut measured: {_ratio(prefix / fastest)}",
        f"the policy runs prefix kernels in {prefers.sum()} of {best.size} batches; "
        f"they are faster in {(prefix < stock).sum()}",
        "time over that of the faster kernels: "
        f"policy {_ratio(chosen / best)}; always stock {_ratio(stock / best)}; "
        f"always prefix {_ratio(prefix / best)}",
    ]


def picked(predicted: list[np.ndarray], us: list[np.ndarray]) -> np.ndarray:
    """Return float64 [n]: of each batch the `us` of the cut that is predicted to be fastest."""
    return np.array([mine[by.argmin()] for by, mine in zip(predicted, us, strict=True)])


def policy_choice(measured: Measured, held_out: HeldOut) -> np.ndarray:
    """Return bool [n]: whether the policy runs prefix kernels, each batch as if the first."""
    prefix = picked(held_out.cut_us, held_out.cut_us)
    decisions = [
        decide(BatchFacts(predicted=Prediction(*us), shares=batch.shared_share > 0))
        for batch, *us in zip(measured.batches, held_out.stock_us, prefix, strict=True)
    ]
    return np.array([decision.variant == PREFIX for decision in decisions])


def _error(name: str, predicted: np.ndarray, us: np.ndarray) -> str:
    worst = np.abs(predicted / us - 1).max()
    return f"{name}: predictions err by {log_rms(predicted, us):.1%}, at worst {worst:.0%}"


def _ratio(ratio: np.ndarray) -> str:
    return f"{np.exp(np.log(ratio).mean()):.4f} on average, {ratio.max():.3f} at worst"
