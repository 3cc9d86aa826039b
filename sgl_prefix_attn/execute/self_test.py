"""Runs kernels once before a server relies on them: they compile, launch and are right.

As a program (self_test_process.py runs it) it tries Hopper's kernels on heads of one shape.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import orjson
import torch

from sgl_prefix_attn.execute.backends.choice import new_backend
from sgl_prefix_attn.execute.backends.family import HOPPER
from sgl_prefix_attn.execute.backends.kernel_backend import KernelBackend
from sgl_prefix_attn.execute.backends.new_kv import store_narrow
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.full_attention import full_attention
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.execute.rounding import why_wrong
from sgl_prefix_attn.execute.self_test_process import NOT_TRIED
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.records import HeadConfig, PathTable

# Three requests below a node; whole and partial blocks, shared and private.
_SHARED, _TAILS = 300, (1, 64, 150)
_ROW = 512  # columns of req_to_token
_SCALES = 0.7, 1.7  # of keys and values of a KV cache that is unlike the model
# Half a step of float8_e4m3fn, relative with what a scale and a quotient are rounded by, and least.
_HALF_STEP, _HALF_LEAST = 2**-4 + 2**-7, 2**-10
# KV positions of aligned plans' parts: all of these requests have several of the first, and some
# have one of the second.
_SHORT_PARTS = 128, 256


def self_test_paths() -> PathTable:
    """Return the batch that check_kernels's plans are for."""
    seq_lens = [_SHARED + tail for tail in _TAILS]
    return PathTable.of([-1], [_SHARED], [0] * len(_TAILS), seq_lens)


def every_plan(backend: KernelBackend) -> Iterator[Plan]:
    """Make a plan of self_test_paths() for each cut that a server may choose, to grow by a step."""
    planner = Planner(
        backend.heads, num_sms=backend.num_sms, headroom=2, tile_rows=backend.tile_rows,
        part_tokens=backend.part_tokens,
    )  # fmt: skip
    forest = build_forest(self_test_paths())
    return (planner.serialize(forest, cut) for cut in planner.cuts(forest))


def check_kernels(
    backend: KernelBackend,
    plans: Iterable[Plan],
    soft_cap: float,
    kv_dtype: torch.dtype | None = None,
    sinks_dtype: torch.dtype | None = None,
) -> None:
    """Run each plan of self_test_paths(), and a step that appends to it, against full attention.

    soft_cap, kv_dtype (None: like the model) and sinks_dtype (None without sinks) of the model's
    layers: each makes kernels of its own. Raises RuntimeError for outputs that are further off than
    torch's in `dtype` explain, for those of aligned plans that are not the same bits by each plan,
    and whatever compiling and launching raise.
    """
    heads, dtype, device = backend.heads, backend.dtype, backend.device
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
    sinks = None
    if sinks_dtype is not None:  # from far below to far above the scores
        sinks = torch.linspace(-4, 12, heads.num_qo_heads).to(device, sinks_dtype)
    if kv_dtype not in (None, dtype):
        k, v, rising = (_stored(new, kv_dtype) for new in (k, v, rising))
    values = [x[..., : heads.latent_dim] if heads.latent_dim else v for x in (rising, k)]
    scales = (1.0, 1.0) if kv_dtype in (None, dtype) else _SCALES
    # before and after a step: lengths, and each layer
    lengths = [seq_lens, seq_lens + 1]
    steps = [
        [
            LayerParams(
                q,
                keys,
                values_of_them,
                q.new_empty(*q.shape[:2], heads.value_dim),
                None,
                scale,
                soft_cap,
                sinks,
                *scales,
            )
            for keys, values_of_them in zip((rising, k), values, strict=True)
        ]
        for _ in lengths
    ]
    expected = [
        [_expected(layer, table, pool, lens) for layer in layers]
        for layers, lens in zip(steps, lengths, strict=True)
    ]
    first: list[torch.Tensor] = []  # outputs of each step and layer by the first plan
    for plan in plans:
        outs: list[torch.Tensor] = []
        executor = PlanExecutor(backend, Capacity.for_plans(plan))
        executor.load(plan, table, pool)
        for layers, answers, lens in zip(steps, expected, lengths, strict=True):
            executor.append(lens, table[pool, lens - 1].long())
            for layer in layers:
                layer.out.fill_(torch.nan)
            for layer in layers:  # launched one behind the other
                executor.run(layer)
            for layer, (want, low) in zip(layers, answers, strict=True):
                wrong = why_wrong(layer.out, want, low)
                if wrong is not None:
                    raise RuntimeError(f"the kernels' self-test is off full attention: {wrong}")
                outs.append(layer.out.clone())
        first = first or outs
        if backend.part_tokens and not all(map(torch.equal, first, outs)):
            raise RuntimeError("the kernels' self-test: another plan gives a request other bits")


def _stored(new: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """Return a narrow cache of these rows, as new tokens are written."""
    cache, other = (torch.zeros_like(new, dtype=kv_dtype) for _ in _SCALES)
    store_narrow(new, new, cache, other, torch.arange(len(new), device=new.device), *_SCALES)
    for stored, scale in zip((cache, other), _SCALES, strict=True):
        exact = new.double()
        off = (stored.double() * scale - exact).abs()
        if not (off <= exact.abs() * _HALF_STEP + scale * _HALF_LEAST).all():  # NaN, too
            raise RuntimeError("the kernels' self-test: KV that is stored is off what it was")
    return cache


def _expected(
    layer: LayerParams, table: torch.Tensor, pool: torch.Tensor, lens: torch.Tensor
) -> list[torch.Tensor]:
    """Full attention over the requests' rows `pool` of req_to_token, in float64 and in the layer's
    dtype."""
    return [
        full_attention(
            layer.q, layer.k_cache, layer.v_cache, table, pool, lens,
            sm_scale=layer.sm_scale, logits_soft_cap=layer.soft_cap, sinks=layer.sinks,
            k_scale=layer.k_scale, v_scale=layer.v_scale, dtype=dtype,
        )[0]
        for dtype in (torch.float64, layer.q.dtype)
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    """Try every plan of one subject (self_test_process.Subject as JSON) on a device; return
    NOT_TRIED where that has no room, or lets no other process in."""
    subject, device = orjson.loads(argv[0]), torch.device(argv[1])
    heads, dtype = HeadConfig(**subject["heads"]), getattr(torch, subject["dtype"])
    sinks_dtype = getattr(torch, subject["sinks"]) if subject["sinks"] else None
    try:
        torch.empty(1 << 24, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        return _not_tried(error)
    kv_dtype, cap = getattr(torch, subject["kv_dtype"] or subject["dtype"]), subject["soft_cap"]
    parts = subject["part_tokens"]
    try:
        for part_tokens in (parts, *_SHORT_PARTS) if parts else (0,):
            # as servers launch them; kernels over aligned plans are the same for parts of any size
            backend = new_backend(HOPPER, device, heads, dtype, pdl=True, part_tokens=part_tokens)
            check_kernels(backend, every_plan(backend), cap, kv_dtype, sinks_dtype)
    except torch.OutOfMemoryError as error:  # says nothing about the kernels
        return _not_tried(error)
    return 0


def _not_tried(error: RuntimeError) -> int:
    print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return NOT_TRIED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
