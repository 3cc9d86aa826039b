"""Whether rounding explains how far an attention output is off: the one judgement of all outputs.

Each request and head is judged by its own norm, never by the largest output of a batch: the output
of a long request is small, and so is its rounding.
"""

import torch

# Scores and LSEs are float32 in any dtype: in one of up to 64, this is the last place, and weights
# are off by as much.
_SCORES = 64 * torch.finfo(torch.float32).eps
# Of what one head may be off by itself, where `low` says nothing else.
_TOGETHER = 0.75


def why_wrong(out: torch.Tensor, want: torch.Tensor, low: torch.Tensor | None = None) -> str | None:
    """Say which row or head of an output is wrong, or return None. Synchronises.

    out   [rows, Hq, D] in the model's dtype
    want  [rows, Hq, D]: the truth in float64, or without `low` another output in out's dtype
    low   [rows, Hq, D]: the same attention in float32, probabilities and results rounded to the
          model's dtype as on tensor cores

    An error is ||out - want|| / ||want|| over the D elements of a row's head. The root mean square
    of a row's heads may be twice that of `low`, or 3/4 epsilon: rounding probabilities and results
    once each comes to 0.3, partial results in the same dtype to 0.55. A head by itself may be twice
    as far off as in `low`, or 1 epsilon, the most that two roundings can do. Two outputs may differ
    by 1.5 and 2 epsilon. NaN is wrong. Raises ValueError for another shape.
    """
    if out.shape != want.shape:
        raise ValueError(f"output is {list(out.shape)}, expected {list(want.shape)}")
    info = torch.finfo(out.dtype)
    rounding = info.eps + _SCORES
    # Elements below the smallest normal number are rounded like that number.
    least = info.smallest_normal * out.shape[-1] ** 0.5
    scale = want.double().norm(dim=-1).clamp(min=least)
    error = (out.double() - want.double()).norm(dim=-1) / scale  # [rows, Hq]
    if low is None:
        allowed = torch.full_like(error, 2 * rounding)
        allowed_together = allowed[:, 0] * _TOGETHER
    else:
        of_low = (low.double() - want.double()).norm(dim=-1) / scale
        allowed = (2 * of_low).clamp(min=rounding)
        allowed_together = (2 * _root_mean_square(of_low)).clamp(min=rounding * _TOGETHER)
    together = _root_mean_square(error)
    # Written so that NaN is wrong.
    if not bool((together <= allowed_together).all()):
        row = int((~(together <= allowed_together)).nonzero()[0])
        return _message(f"row {row}", together[row], allowed_together[row])
    if not bool((error <= allowed).all()):
        row, head = (~(error <= allowed)).nonzero()[0].tolist()
        return _message(f"row {row}, head {head}", error[row, head], allowed[row, head])
    return None


def _root_mean_square(error: torch.Tensor) -> torch.Tensor:
    return error.square().mean(dim=-1).sqrt()


def _message(where: str, error: torch.Tensor, allowed: torch.Tensor) -> str:
    return f"{where} is off by {error:.2g} of its norm, rounding explains {allowed:.2g}"
