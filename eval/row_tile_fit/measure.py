"""Times cuts of random batches on this GPU, for one head configuration after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from eval.row_tile_fit.samples import Sample
from sgl_prefix_attn.calibrate.batches import Batch
from sgl_prefix_attn.calibrate.measure import slots_of
from sgl_prefix_attn.calibrate.timing import LayerTimer, medians_us
from sgl_prefix_attn.execute.backends import gluon_backend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.execute.self_test_process import Subject, run_self_test
from sgl_prefix_attn.plan.forest import build_forest
from sgl_prefix_attn.plan.row_tile_planner import HOPELESS, RowTilePlanner
from sgl_prefix_attn.plan.row_tiles import Cut
from sgl_prefix_attn.records import HeadConfig

POOL_TOKENS = 256 << 10
MOST_BATCHES = 400  # that are drawn of a seed: more than there is time for
_COLD_BYTES = 200e6  # that a graph reads, four times the L2 cache
_CUTS = 4  # of each batch: those predicted best, and some that the planner leaves


def compile_all(all_heads: list[HeadConfig], gpu: str) -> None:
    """Compile and try the kernels of all head configurations at once, each in its own process.
    Raises RuntimeError for one that fails."""

    def one(heads: HeadConfig) -> str | None:
        subject = Subject.of(gpu, heads, "bfloat16", 0.0, {})
        return run_self_test(subject, "cuda:0").why_not

    with ThreadPoolExecutor(len(all_heads)) as pool:
        for heads, why_not in zip(all_heads, pool.map(one, all_heads), strict=True):
            if why_not is not None:
                raise RuntimeError(f"{heads}: {why_not}")


def sample(
    heads: HeadConfig, batches: Mapping[str, Batch], seconds: float, device: torch.device, gpu: str
) -> Iterator[Sample]:
    """Yield samples of so many seconds, of one named batch after the other."""
    backend = gluon_backend.GluonBackend(heads, torch.bfloat16, device)
    planner = RowTilePlanner(heads, num_sms=backend.num_sms, headroom=0)
    planner.warm_up()
    generator = torch.Generator(device).manual_seed(0)
    shape = (2, 2 * POOL_TOKENS, heads.num_kv_heads, heads.head_dim)
    kv = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    for name, batch in batches.items():
        if time.monotonic() > end:
            return
        forest = build_forest(batch.paths)
        cuts = chosen(list(planner.cuts(forest)))
        plans = [planner.serialize(forest, cut) for cut in cuts]
        times = _times(backend, plans, batch, kv)
        for cut, us in zip(cuts, times, strict=True):
            yield Sample.of(gpu, planner.num_sms, heads, name, forest.unique_tokens, cut, us)


def chosen(cuts: list[Cut]) -> list[Cut]:
    """Of all cuts some: the two that are predicted best, others evenly up to hopeless ones."""
    cuts = sorted(cuts, key=lambda cut: cut.us)
    cuts = [cut for cut in cuts if cut.us <= HOPELESS * cuts[0].us]
    if len(cuts) <= _CUTS:
        return cuts
    rest = np.linspace(2, len(cuts) - 1, _CUTS - 2).astype(int)
    return [*cuts[:2], *(cuts[i] for i in rest)]


def _times(backend, plans, batch: Batch, kv: torch.Tensor) -> list[float]:
    """Microseconds per layer of each plan; their replays take turns."""
    device, heads = kv.device, backend.heads
    slots, num_slots = slots_of(batch.paths, 1, device)
    size = 2 * num_slots * kv[0, 0].nbytes
    layers = max(2, min(16, int(_COLD_BYTES // size) + 1, kv.shape[1] // num_slots))
    q = torch.randn(
        batch.size, heads.num_qo_heads, heads.head_dim, device=device, dtype=torch.bfloat16
    )
    out = torch.empty_like(q)
    seq_lens = torch.from_numpy(batch.paths.seq_lens).to(device)
    rows = torch.arange(batch.size, device=device)

    def timer(plan) -> LayerTimer:
        executor = PlanExecutor(backend, Capacity.for_plans(plan))
        executor.load(plan, slots, rows)
        return LayerTimer(_runner(executor, q, kv, num_slots, seq_lens, out), layers, device, True)

    return medians_us([timer(plan) for plan in plans])


def _runner(executor, q, kv, num_slots: int, seq_lens, out) -> Callable[[int], torch.Tensor]:
    def run(layer: int) -> torch.Tensor:
        k, v = kv[:, layer * num_slots : (layer + 1) * num_slots]
        executor.run(LayerParams(q, k, v, seq_lens, out, None, q.shape[2] ** -0.5, 0.0))
        return out

    return run
