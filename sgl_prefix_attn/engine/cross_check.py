"""Comparison of two attention outputs in check mode (SGL_PREFIX_ATTN_CHECK=1)."""

import logging

import torch

from sgl_prefix_attn.metrics.counters import StepCounters

# Share of the largest output that rounding may explain: both sides accumulate in float32 and
# round the result (and, in kernels, the probabilities) to the dtype.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check_layer(layer_id: int, out, expected, counters: StepCounters) -> None:
    """Count and log a layer whose two outputs [B, ...] of one dtype differ. Synchronises."""
    difference = layer_mismatch(out, expected)
    if difference is not None:
        counters.mismatch()
        counters.log_once(
            "check_mismatch",
            logging.ERROR,
            "layer %d: prefix and stock attention differ: %s",
            layer_id,
            difference,
        )


def layer_mismatch(out: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Say what differs between two outputs [B, ...] of one dtype, or None. Synchronises."""
    error = (out.float() - expected.float()).abs().flatten(1).amax(dim=1)
    scale = float(expected.float().abs().max())
    allowed = _TOLERANCE[out.dtype] * max(scale, 1e-6)
    # A NaN compares false: count what is known to be good.
    bad = ~(error <= allowed)
    if not bool(bad.any()):
        return None
    row = int(bad.nonzero()[0])
    return f"row {row} by {float(error[row]):.3g} where {allowed:.3g} is allowed"
