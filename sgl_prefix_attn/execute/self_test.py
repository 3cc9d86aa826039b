"""Runs kernels once before a server relies on them: they compile, launch and are right.

As a program (self_test_process.py runs it) it tries row tiles of one shape.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import orjson
import torch

from sgl_prefix_attn.execute.backends.kernel_backend import KernelBackend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.execute.reference import full_attention
from sgl_prefix_attn.execute.self_test_process import NOT_TRIED
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.records import HeadConfig, PathTable, StepPlan

# Three requests below a node; whole and partial blocks, shared and private.
_SHARED, _TAILS = 300, (1, 64, 150)
_ROW = 512  # columns of req_to_token


def self_test_paths() -> PathTable:
    """The batch that check_kernels's plans are for."""
    seq_lens = [_SHARED + tail for tail in _TAILS]
    return PathTable.of([-1], [_SHARED], [0] * len(_TAILS), seq_lens)


def check_kernels(
    backend: KernelBackend,
    plans: Iterable[StepPlan],
    heads: HeadConfig,
    dtype: torch.dtype,
    device: torch.device,
    soft_cap: float,
) -> None:
    """Run each plan of self_test_paths(), and a step that appends to it, against full attention.

    soft_cap of the model's layers: with and without are two kernels. Raises RuntimeError for
    outputs that are further off than twice the error of torch in `dtype`, and whatever compiling
    and launching raise.
    """
    generator = torch.Generator().manual_seed(0)
    batch = len(_TAILS)
    slots = torch.randperm(batch * _ROW, generator=generator).view(batch, _ROW).int()
    slots[:, :_SHARED] = slots[0, :_SHARED]
    pool = torch.arange(batch, device=device)
    table, seq_lens = slots.to(device), torch.tensor([_SHARED + t for t in _TAILS], device=device)
    q, k, v = (
        torch.randn(rows, count, heads.head_dim, generator=generator).to(device, dtype)
        for rows, count in (
            (batch, heads.num_qo_heads),
            (batch * _ROW, heads.num_kv_heads),
            (batch * _ROW, heads.num_kv_heads),
        )
    )
    # Two layers, because a dependent launch is not the first one behind an append. In one of them
    # scores rise with every token, so that maxima are taken anew.
    rising = k.clone()
    rising[slots.long()] *= 1 + torch.arange(_ROW, device=device, dtype=dtype)[:, None, None] / 64
    scale = heads.head_dim**-0.5
    # before and after a step, of each layer
    steps = [
        [
            LayerParams(q, keys, v, seq_lens + grown, torch.empty_like(q), None, scale, soft_cap)
            for keys in (rising, k)
        ]
        for grown in range(2)
    ]
    expected = [[_expected(layer, table, pool) for layer in layers] for layers in steps]
    for plan in plans:
        executor = PlanExecutor(backend, Capacity.for_plans(plan))
        executor.load(plan, table, pool)
        for layers, answers in zip(steps, expected, strict=True):
            lens = layers[0].seq_lens
            executor.append(lens, table[pool, lens - 1].long())
            for layer in layers:
                layer.out.fill_(torch.nan)
            for layer in layers:  # launched one behind the other
                executor.run(layer)
            for layer, (want, bound) in zip(layers, answers, strict=True):
                error = (layer.out.double() - want).abs().max()
                if not error <= bound:  # nor NaN
                    raise RuntimeError(
                        f"the kernels' self-test is {error:.2g} off full attention, allowed is "
                        f"{bound:.2g}"
                    )


def _expected(layer: LayerParams, table: torch.Tensor, pool: torch.Tensor):
    """Full attention over the requests' rows `pool` of req_to_token, and how far outputs may be
    off."""
    dtype = layer.q.dtype
    want, same_dtype = (
        full_attention(
            layer.q, layer.k_cache, layer.v_cache, table, pool, layer.seq_lens,
            sm_scale=layer.sm_scale, logits_soft_cap=layer.soft_cap, dtype=kind,
        )[0].double()
        for kind in (torch.float64, dtype)
    )  # fmt: skip
    rounding = torch.finfo(dtype).eps * want.abs().max()
    return want, 2 * (same_dtype - want).abs().max() + rounding


def main(argv: list[str]) -> int:
    """Try every plan of one subject (self_test_process.Subject as JSON) on a device; return
    NOT_TRIED where that has no room, or lets no other process in."""
    from sgl_prefix_attn.execute.backends.gluon_backend import GluonBackend

    subject, device = orjson.loads(argv[0]), torch.device(argv[1])
    heads, dtype = HeadConfig(**subject["heads"]), getattr(torch, subject["dtype"])
    try:
        torch.empty(1 << 24, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        return _not_tried(error)
    backend = GluonBackend(heads, dtype, device, pdl=True)  # as servers launch them
    planner = RowTilePlanner(heads, num_sms=backend.num_sms, headroom=2)
    forest = build_forest(self_test_paths())
    plans = (planner.serialize(forest, cut) for cut in planner.cuts(forest))
    try:
        check_kernels(backend, plans, heads, dtype, device, subject["soft_cap"])
    except torch.OutOfMemoryError as error:  # says nothing about the kernels
        return _not_tried(error)
    return 0


def _not_tried(error: RuntimeError) -> int:
    print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return NOT_TRIED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
