"""Times one layer of a decode batch on this GPU: the decode of SGLang's backends, plans of ours."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from sgl_prefix_attn.execute.backends.choice import new_backend
from sgl_prefix_attn.execute.backends.kernel_backend import NARROW_KV
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.execute.rounding import why_wrong
from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.plan.planner import Planner
from sgl_prefix_attn.predict.record import CalibrationKey
from sgl_prefix_attn.records import PathTable
from sgl_prefix_attn.tools.calibrate.batches import Batch, prefix_lens
from sgl_prefix_attn.tools.calibrate.stock_decode import StockBatch, decodes
from sgl_prefix_attn.tools.calibrate.timing import LayerTimer, medians_us

_COLD_BYTES = 400e6  # a graph reads this much KV, so that no layer finds its own in the L2 cache
_MAX_LAYERS = 32
# Of the batch by which the bandwidth is measured.
_REQUESTS, _LONGEST = 128, 4096


def min_pool(page_size: int) -> int:
    """Return how many KV tokens, with page rounding, measuring the bandwidth needs."""
    return max(1 << 17, 4 * _REQUESTS * page_size)


class BatchMeter:
    """Measures batches of one kind of layers in one KV arena, which it keeps.

    key           of the GPU, the family of kernels, the fallback and the layers
    pool_tokens   the largest batch, in unique KV tokens with page rounding
    fallbacks     those that are timed, by SGLang's names; None: the key's
    """

    def __init__(
        self,
        key: CalibrationKey,
        *,
        pool_tokens: int,
        max_batch: int,
        device: torch.device,
        fallbacks: Sequence[str] | None = None,
    ):
        self._decodes = [decodes(key.heads)[name] for name in fallbacks or [key.fallback]]
        self.heads = key.heads
        self.kv_dtype = getattr(torch, key.dtype)
        self.dtype = torch.bfloat16 if self.kv_dtype == NARROW_KV else self.kv_dtype  # of queries
        self.page_size = key.page_size
        self.pool_tokens = pool_tokens
        self.device = device
        self.backend = new_backend(
            key.family, device, key.heads, self.dtype, kv_dtype=self.kv_dtype
        )
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            shape = (*shape, self.heads.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=self.dtype)

        slots = (2 * pool_tokens, self.heads.num_kv_heads)
        self._k = random(*slots).to(self.kv_dtype)
        if self.heads.latent_dim:
            self._v = self._k[..., : self.heads.latent_dim]
        else:
            self._v = random(*slots).to(self.kv_dtype)
        self._q = random(max_batch, self.heads.num_qo_heads)
        self._token_bytes = self.heads.num_kv_heads * self.heads.token_dim * self.kv_dtype.itemsize

    def measure(self, batch: Batch, plans: Sequence[Plan]) -> tuple[list[float], list[float]]:
        """Time the fallbacks and plans of a batch, by CUDA-graph replay with cold L2.

        Returns their median microseconds per layer. Raises RuntimeError where results differ by
        more than rounding explains: a wrong kernel is not timed.
        """
        slots, num_slots = slots_of(batch.paths, self.page_size, self.device)
        layers = self._layers(num_slots)
        stock = [self._stock_timer(kind, batch, slots, layers) for kind in self._decodes]
        stock[0].replay()
        prefix = [self._prefix_timer(plan, batch.paths, slots, layers) for plan in plans]
        for timer in [*stock[1:], *prefix]:
            timer.replay()
            if wrong := why_wrong(timer.outs[0], stock[0].outs[0]):
                raise RuntimeError(
                    f"prefix and stock attention differ on a batch of {batch.size} requests "
                    f"({batch.name}): {wrong}"
                )
        us = medians_us([*stock, *prefix])
        return us[: len(stock)], us[len(stock) :]

    def bandwidth(self, planner: Planner) -> float:
        """Measure the bytes/us of a paged gather: requests that share nothing, less a step of none.

        Raises RuntimeError when times make no sense, as when something else runs on the GPU.
        """
        pages = min(_LONGEST, self.pool_tokens // _REQUESTS) // self.page_size
        length = pages * self.page_size
        paths = PathTable.of([], [], [-1] * _REQUESTS, [length] * _REQUESTS)
        padding = planner.plan(PathTable.of([], [], [], []))
        us = self.prefix_us(planner.plan(paths), paths) - self.prefix_us(padding, paths)
        if us <= 0:
            raise RuntimeError(
                f"measured times make no sense: reading {length} KV tokens of {_REQUESTS} requests "
                f"took {us:.4g} us longer than none"
            )
        return _REQUESTS * length * self._token_bytes / us

    def prefix_us(self, plan: Plan, paths: PathTable) -> float:
        """Time any plan over the KV of `paths`; its results are not looked at."""
        slots, num_slots = slots_of(paths, self.page_size, self.device)
        return self._prefix_timer(plan, paths, slots, self._layers(num_slots)).us()

    def _layers(self, num_slots: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cut K and V of as many layers from the arena as it takes to leave the L2 cache."""
        size = num_slots * self._token_bytes
        count = max(2, min(_MAX_LAYERS, int(_COLD_BYTES // size) + 1, len(self._k) // num_slots))
        parts = [slice(i * num_slots, (i + 1) * num_slots) for i in range(count)]
        return [(self._k[part], self._v[part]) for part in parts]

    def _prefix_timer(self, plan: Plan, paths: PathTable, slots, layers) -> LayerTimer:
        q = self._q[: paths.seq_lens.size]
        outs = [self._new_out(q).fill_(math.nan) for _ in layers]
        rows = torch.arange(paths.seq_lens.size, device=self.device)
        executor = PlanExecutor(self.backend, Capacity.for_plans(plan))
        executor.load(plan, slots, rows)

        def run(layer: int) -> torch.Tensor:
            k, v = layers[layer]
            sm_scale = self.heads.head_dim**-0.5
            executor.run(LayerParams(q, k, v, outs[layer], None, sm_scale, 0.0))
            return outs[layer]

        return LayerTimer(run, len(layers), self.device, True)

    def _new_out(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], self.heads.value_dim)

    def _stock_timer(self, kind, batch: Batch, slots, layers) -> LayerTimer:
        seq_lens = torch.from_numpy(batch.paths.seq_lens)
        page_size = kind.page_size or self.page_size
        pages = (slots[:, ::page_size] // page_size).contiguous()
        decode = kind(StockBatch(self.heads, self.dtype, self.kv_dtype, page_size, seq_lens, pages))
        q = self._q[: batch.size]
        outs = [self._new_out(q) for _ in layers]

        def run(layer: int) -> torch.Tensor:
            k, v = (x.unflatten(0, (-1, page_size)) for x in layers[layer])
            return decode.run(q, (k, v), outs[layer])

        return LayerTimer(run, len(layers), self.device, True)


def slots_of(paths: PathTable, page_size: int, device) -> tuple[torch.Tensor, int]:
    """Lay out req_to_token int32 [B, longest] with pages in random order, and count its slots."""
    private = paths.seq_lens - prefix_lens(paths)
    sizes = np.concatenate([paths.length, private]).astype(np.int64)
    pages = -(-sizes // page_size)
    generator = torch.Generator(device).manual_seed(0)
    order = torch.randperm(int(pages.sum()), generator=generator, device=device)
    tokens = torch.arange(page_size, device=device)
    slots = (order[:, None] * page_size + tokens).flatten().to(torch.int32)
    pieces = slots.split((pages * page_size).tolist())  # of nodes, then of each request's own
    parts = [piece[:size] for piece, size in zip(pieces, sizes, strict=True)]
    shape = paths.leaf.size, int(paths.seq_lens.max())
    table = torch.zeros(shape, dtype=torch.int32, device=device)
    for row, node in enumerate(paths.leaf):
        row_parts = [parts[paths.length.size + row]]
        while node >= 0:
            row_parts.insert(0, parts[node])
            node = paths.parent[node]
        table[row, : paths.seq_lens[row]] = torch.cat(row_parts)
    return table, slots.numel()
