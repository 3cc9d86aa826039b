"""Ground truth and the judgement of an output against it.

The truth is full attention of every request over its own row of slots, in fp64. An output is judged
by the error that plain torch makes on the same inputs at low precision (fp32 scores and softmax,
probabilities and output in the case's dtype), not by a hand-picked tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from eval.bench_kernel.case import Case

# Allowed multiples of low-precision torch's error: over all, and of the worst (request, head).
# One missing token of a 16k context moves its row by about three times torch's bf16 error.
_NORM_FACTOR = 2.0
_ROW_FACTOR = 3.0
_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True)
class Error:
    """||out - truth|| / ||truth||: over all of the output, and of the worst (request, head)."""

    norm: float
    worst_row: float


class Judgement:
    """Judges outputs [B, Hq, D] by `truth` (fp64) and the error of `low`, low-precision torch."""

    def __init__(self, truth: torch.Tensor, low: torch.Tensor):
        self._truth = truth
        self.error_torch = self.error(low)

    def error(self, out: torch.Tensor) -> Error:
        """Measure an output; NaN in it makes the error NaN. Raises ValueError for another shape."""
        if out.shape != self._truth.shape:
            raise ValueError(f"output is {list(out.shape)}, expected {list(self._truth.shape)}")
        difference = out.to(torch.float64) - self._truth
        rows = difference.norm(dim=-1) / self._truth.norm(dim=-1)
        return Error(float(difference.norm() / self._truth.norm()), float(rows.max()))

    def problem(self, error: Error) -> str | None:
        """Say why an output with this error is wrong, or return None."""
        limit = self.error_torch
        # Written so that NaN is a problem.
        if not error.norm <= _NORM_FACTOR * limit.norm:
            return f"error {error.norm:.2e}, low-precision torch {limit.norm:.2e}"
        if not error.worst_row <= _ROW_FACTOR * limit.worst_row:
            return f"worst row {error.worst_row:.2e}, low-precision torch {limit.worst_row:.2e}"
        return None


class RowJudge:
    """Judges `rows` of outputs [Q, Hq, D] by `truth` and `low` of these; the others must be
    written."""

    def __init__(self, rows: torch.Tensor, truth: torch.Tensor, low: torch.Tensor):
        self._rows = rows
        self._judgement = Judgement(truth, low)
        self.error_torch = self._judgement.error_torch.norm

    def problem(self, out: torch.Tensor) -> tuple[str | None, float]:
        """Say why an output is wrong, or None, and its error."""
        error = self._judgement.error(out[self._rows])
        problem = self._judgement.problem(error)
        if problem is None and out.isnan().any():
            problem = "rows of the output are not written"
        return problem, error.norm


class Wrong(Exception):
    """An output that is too far from the truth; the largest errors of all layers, its own and
    low-precision torch's."""

    def __init__(self, reason: str, error: float, error_torch: float):
        super().__init__(reason)
        self.error = error
        self.error_torch = error_torch


class Oracle:
    """Judges every layer of a case by that layer's KV; computed once for all providers."""

    def __init__(self, case: Case):
        exact = torch.float64
        self._layers = [
            Judgement(
                attend(case, k, v, exact, exact), attend(case, k, v, torch.float32, case.dtype)
            )
            for k, v in zip(case.k, case.v, strict=True)
        ]
        self.error_torch = max(layer.error_torch.norm for layer in self._layers)

    def judge(self, outs: list[torch.Tensor], when: str) -> float:
        """Return the largest error of the outputs, one [B, Hq, D] per layer. Raises Wrong, naming
        `when` and the first wrong layer, and ValueError for another shape or number of outputs."""
        pairs = list(zip(self._layers, outs, strict=True))
        errors = [layer.error(out) for layer, out in pairs]
        # NaN is the largest error; max() would pass over it.
        largest = float(torch.tensor([error.norm for error in errors], dtype=torch.float64).max())
        for i, ((layer, _), error) in enumerate(zip(pairs, errors, strict=True)):
            problem = layer.problem(error)
            if problem is not None:
                raise Wrong(f"{when}, layer {i}: {problem}", largest, self.error_torch)
        return largest


class SomeRows:
    """Judges the first layer's output by some of a case's requests: fewer, the longer they are."""

    def __init__(self, case: Case, most: int = 48, tokens: int = 1 << 20):
        batch = case.tree.batch_size
        most = max(1, min(most, batch, tokens // case.tree.seq_len))
        rows = np.unique(np.linspace(0, batch - 1, most).astype(int))
        self._index = torch.from_numpy(rows).to(case.device)
        args = (case, case.k[0], case.v[0])
        self._judge = Judgement(
            attend(*args, torch.float64, torch.float64, self._index),
            attend(*args, torch.float32, case.dtype, self._index),
        )

    def judge(self, out: torch.Tensor) -> tuple[float, str | None]:
        """Return the error of an output [B, Hq, D], and say why it is wrong, or None."""
        error = self._judge.error(out[self._index])
        problem = self._judge.problem(error)
        if problem is None and out.isnan().any():
            problem = "rows of the output are not written"
        return error.norm, problem


def attend(
    case: Case,
    k: torch.Tensor,
    v: torch.Tensor,
    score_dtype: torch.dtype,
    dtype: torch.dtype,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [b, Hq, D] in `dtype` of the requests index [b] of a case, by default of
    all; see attend_rows."""
    heads, length = case.heads, case.tree.seq_len
    row_bytes = length * heads.num_kv_heads * heads.head_dim * (score_dtype.itemsize + 2) * 2
    chunk = max(1, _CHUNK_BYTES // row_bytes)
    outs = []
    table, queries = case.req_to_token, case.q
    if index is not None:
        table, queries = table[index], queries[index]
    for first in range(0, table.shape[0], chunk):
        rows = table[first : first + chunk]
        q = queries[first : first + chunk]
        outs.append(attend_rows(q, k, v, rows, case.sm_scale, score_dtype, dtype))
    return torch.cat(outs)


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    sm_scale: float,
    score_dtype: torch.dtype,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attend with q [b, Hq, D] to slots rows [b, tokens] of k, v [slots, Hkv, D]: scores and
    softmax in `score_dtype`, probabilities @ V in `dtype`. Returns [b, Hq, D] in `dtype`."""
    rows = rows.long()
    # [b, Hkv, group, D] x [b, Hkv, D, tokens]
    q = q.to(score_dtype).unflatten(1, (k.shape[1], -1))
    keys = k[rows].to(score_dtype).permute(0, 2, 3, 1)
    weights = torch.softmax(q @ keys * sm_scale, dim=-1).to(dtype)
    values = v[rows].to(dtype).transpose(1, 2)
    return (weights @ values).flatten(1, 2)
