"""Ground truth and the judgement of an output against it.

The truth is full attention of every request over its own row of slots, in fp64. An output is judged
request by request and head by head, by the error that plain torch makes on the same inputs at low
precision (fp32 scores and softmax, probabilities and output in the case's dtype); that of a kernel
that rounds queries and probabilities to a narrow KV cache's dtype, by that of torch doing so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from eval.bench_kernel.case import Case
from sgl_prefix_attn.execute.rounding import why_wrong

_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True)
class Error:
    """||out - truth|| / ||truth||: over all of the output, and of the worst (request, head)."""

    norm: float
    worst_row: float


class Judgement:
    """Judges outputs [B, Hq, D] by `truth` (fp64) and the error of `low`, low-precision torch."""

    def __init__(self, truth: torch.Tensor, low: torch.Tensor):
        self._truth, self._low = truth, low
        self.error_torch = self.error(low)

    def error(self, out: torch.Tensor) -> Error:
        """Measure an output; NaN in it makes the error NaN. Raises ValueError for another shape."""
        if out.shape != self._truth.shape:
            raise ValueError(f"output is {list(out.shape)}, expected {list(self._truth.shape)}")
        difference = out.to(torch.float64) - self._truth
        rows = difference.norm(dim=-1) / self._truth.norm(dim=-1)
        return Error(float(difference.norm() / self._truth.norm()), float(rows.max()))

    def problem(self, out: torch.Tensor) -> str | None:
        """Say why an output is wrong, or return None."""
        return why_wrong(out, self._truth, self._low)


class Wrong(Exception):
    """An output that is too far from the truth; the largest errors of all layers, its own and
    low-precision torch's."""

    def __init__(self, reason: str, error: float, error_torch: float):
        super().__init__(reason)
        self.error = error
        self.error_torch = error_torch


class Oracle:
    """Judges every layer of a case by that layer's KV; computed once for all providers.

    rows     int64 [n] of q that are judged, by default all; the others must be written
    narrows  they may round queries and probabilities to the KV cache's dtype

    error_torch  the largest error of low-precision torch
    """

    def __init__(self, case: Case, rows: torch.Tensor | None = None, narrows: bool = False):
        self._rows, self._shape = rows, (*case.q.shape[:2], case.heads.value_dim)
        exact, narrow = torch.float64, case.kv_dtype if narrows else None
        self._layers = [
            Judgement(
                attend(case, k, v, exact, exact, rows),
                attend(case, k, v, torch.float32, case.dtype, rows, narrow),
            )
            for k, v in zip(case.k, case.v, strict=True)
        ]
        self.error_torch = max(layer.error_torch.norm for layer in self._layers)

    def judge(self, outs: list[torch.Tensor], when: str) -> float:
        """Return the largest error of the outputs, one [rows of q, Hq, D] per layer. Raises Wrong,
        naming `when` and the first wrong layer, and ValueError for another shape or number of
        outputs."""
        for out in outs:
            if out.shape != self._shape:
                raise ValueError(f"output is {list(out.shape)}, expected {list(self._shape)}")
        judged = outs if self._rows is None else [out[self._rows] for out in outs]
        pairs = list(zip(self._layers, judged, strict=True))
        errors = [layer.error(out) for layer, out in pairs]
        # NaN is the largest error; max() would pass over it.
        largest = float(torch.tensor([error.norm for error in errors], dtype=torch.float64).max())
        for i, (layer, out) in enumerate(pairs):
            problem = layer.problem(out)
            if problem is None and outs[i].isnan().any():
                problem = "rows of the output are not written"
            if problem is not None:
                raise Wrong(f"{when}, layer {i}: {problem}", largest, self.error_torch)
        return largest


def some_rows(case: Case, requests: int = 12, tokens: int = 4) -> torch.Tensor:
    """Pick rows of q to judge where all would take too long: of some requests, the shortest and the
    longest among them, the first and the last token and some between."""
    order = np.argsort(case.paths.seq_lens, kind="stable")
    first = order[_spread(case.batch_size, requests)] * case.tokens
    rows = first[:, None] + _spread(case.tokens, tokens)
    return torch.from_numpy(rows.flatten()).to(case.device)


def _spread(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(int))


def attend(
    case: Case, k: torch.Tensor, v: torch.Tensor, score_dtype: torch.dtype, dtype: torch.dtype,
    rows: torch.Tensor | None = None, narrow: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return attention [n, Hq, D] in `dtype` of rows int64 [n] of a case's q, by default of all;
    see attend_rows."""
    if rows is None:
        rows = torch.arange(case.q.shape[0], device=case.device)
    request = rows // case.tokens
    sees = case.seq_lens[request] - (case.tokens - 1 - rows % case.tokens)
    shape = rows.numel(), case.heads.num_qo_heads, case.heads.value_dim
    out = torch.empty(shape, dtype=dtype, device=case.device)
    for length in sees.unique().tolist():
        row_bytes = length * case.k[0][0].numel() * (score_dtype.itemsize + 2) * 2
        alike = (sees == length).nonzero()[:, 0]
        for part in alike.split(max(1, _CHUNK_BYTES // row_bytes)):
            slots = case.req_to_token[request[part], :length]
            q = case.q[rows[part]]
            out[part] = attend_rows(q, k, v, slots, case.sm_scale, score_dtype, dtype, narrow)
    return out


def attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, sm_scale: float,
    score_dtype: torch.dtype, dtype: torch.dtype, narrow: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend with q [b, Hq, D] to slots rows [b, tokens] of k, v [slots, Hkv, D]: scores and
    softmax in `score_dtype`, probabilities @ V in `dtype`. Returns [b, Hq, D] in `dtype`.

    narrow: what queries and probabilities, over the largest of a row, are rounded to before.
    """
    rows = rows.long()
    # [b, Hkv, group, D] x [b, Hkv, D, tokens]
    q = q.to(narrow or q.dtype).to(score_dtype).unflatten(1, (k.shape[1], -1))
    keys = k[rows].to(score_dtype).permute(0, 2, 3, 1)
    weights = torch.softmax(q @ keys * sm_scale, dim=-1)
    if narrow is not None:
        top = weights.amax(-1, keepdim=True)
        weights = (weights / top).to(narrow).to(score_dtype) * top
    weights = weights.to(dtype)
    values = v[rows].to(dtype).transpose(1, 2)
    return (weights @ values).flatten(1, 2)
