"""A dumped layer judged by full attention over the same q and KV."""

from __future__ import annotations

import torch

from eval.bench_kernel.oracle import Error, Judgement, attend_rows
from eval.compare_outputs.dump import LayerDump
from eval.engine_process import uses_prefix


def judge(layer: LayerDump, device: torch.device | str = "cpu") -> tuple[Error, Error, str | None]:
    """Return errors of the output and of low-precision torch, and why the output is wrong."""
    exact = torch.float64
    judgement = Judgement(
        _attend(layer, exact, exact, device), _attend(layer, torch.float32, layer.q.dtype, device)
    )
    error = judgement.error(layer.out.to(device))
    return error, judgement.error_torch, judgement.problem(error)


def not_the_step(layer: LayerDump, backend: str, graphs: bool) -> str | None:
    """Say why a dumped step tells nothing about `backend`, or return None."""
    if uses_prefix(backend) and (layer.decision is None or layer.decision[0] != "prefix"):
        return f"ran without the prefix kernels (decision {layer.decision})"
    if graphs and not layer.replayed:
        return "ran eagerly although CUDA graphs are on"
    return None


def three_layers(count: int) -> list[int]:
    """Return the first, middle and last of `count` layers."""
    return [0, count // 2, count - 1]


def _attend(
    layer: LayerDump, score_dtype: torch.dtype, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Attend request by request, because their lengths differ; [B, Hq, D] in `dtype`."""
    q, k, v, index = (x.to(device) for x in (layer.q, layer.k, layer.v, layer.index))
    return torch.cat(
        [
            attend_rows(
                q[i : i + 1], k, v, index[i : i + 1, :length], layer.sm_scale, score_dtype, dtype
            )
            for i, length in enumerate(layer.seq_lens.tolist())
        ]
    )
