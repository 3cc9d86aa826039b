"""Comparison of two attention outputs in check mode (SGL_PREFIX_ATTN_CHECK=1)."""

from __future__ import annotations

import torch

# Share of the largest output that rounding may explain: both sides accumulate in float32 and
# round the result (and, in kernels, the probabilities) to the dtype.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def layer_mismatch(out: torch.Tensor, expected: torch.Tensor) -> str | None:
    """What differs between two outputs [B, ...] of one dtype, or None. Synchronises."""
    rows = len(out)
    error = (out.float() - expected.float()).abs().reshape(rows, -1).amax(dim=1)
    scale = float(expected.float().abs().max())
    allowed = _TOLERANCE[out.dtype] * max(scale, 1e-6)
    # A NaN compares false: count what is known to be good.
    bad = ~(error <= allowed)
    if not bool(bad.any()):
        return None
    row = int(bad.nonzero()[0])
    return f"row {row} by {float(error[row]):.3g} where {allowed:.3g} is allowed"
