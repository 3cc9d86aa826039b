"""Times one layer of a decode batch on this GPU: SGLang's FlashInfer decode, and a plan of ours."""

import numpy as np
import torch

from sgl_prefix_attn.calibrate.batches import Batch, prefix_lens
from sgl_prefix_attn.calibrate.timing import LayerTimer, medians_us
from sgl_prefix_attn.execute.backends.choice import new_backend, row_tile_backend
from sgl_prefix_attn.execute.executor import PlanExecutor
from sgl_prefix_attn.execute.params import Capacity, LayerParams
from sgl_prefix_attn.plan import Planner
from sgl_prefix_attn.plan.row_tile_planner import RowTilePlanner
from sgl_prefix_attn.predict.stock_time import on_tensor_cores
from sgl_prefix_attn.records import HeadConfig, PathTable, StepPlan

_STOCK_WORKSPACE = 512 << 20
_COLD_BYTES = 400e6  # a graph reads this much KV, so that no layer finds its own in the L2 cache
_MAX_LAYERS = 32
# Both results carry low-precision rounding of about 2e-3; a wrong one is off by far more.
_LARGEST_DIFFERENCE = 2e-2


class BatchMeter:
    """Measures batches of one head configuration in one KV arena, which it keeps.

    pool_tokens   the largest batch, in unique KV tokens with page rounding
    Raises RuntimeError where the two results differ: a wrong kernel is not timed.
    """

    def __init__(
        self,
        planner: Planner | RowTilePlanner,
        *,
        dtype: torch.dtype,
        page_size: int,
        pool_tokens: int,
        max_batch: int,
        device: torch.device,
    ):
        self.planner = planner
        self.heads = planner.heads
        self.dtype = dtype
        self.page_size = page_size
        self.device = device
        shape = (2 * pool_tokens, self.heads.num_kv_heads, self.heads.head_dim)
        generator = torch.Generator(device).manual_seed(0)
        self._k, self._v = (
            torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2)
        )
        q_shape = (max_batch, self.heads.num_qo_heads, self.heads.head_dim)
        self._q = torch.randn(q_shape, generator=generator, device=device, dtype=dtype)
        self._executor = _executor(planner, dtype, device, max_batch, pool_tokens)
        self._stock_workspace = torch.empty(_STOCK_WORKSPACE, dtype=torch.uint8, device=device)

    def measure(self, batch: Batch) -> tuple[float, float]:
        """Time stock and prefix kernels on a batch, by CUDA-graph replay with cold L2.

        Returns their median microseconds per layer. Raises RuntimeError when the results differ.
        """
        slots, num_slots = slots_of(batch.paths, self.page_size, self.device)
        layers = self._layers(num_slots)
        stock = self._stock_timer(batch, slots, layers)
        plan = self.planner.plan(batch.paths)
        prefix = self._prefix_timer(plan, batch.paths, slots, layers)
        stock.replay()
        prefix.replay()
        wanted, found = stock.outs[0].float(), prefix.outs[0].float()
        difference = ((wanted - found).norm() / wanted.norm()).item()
        if not difference <= _LARGEST_DIFFERENCE:
            raise RuntimeError(
                f"prefix and stock attention differ by {difference:.3g} on a batch of {batch.size} "
                f"requests ({batch.name})"
            )
        stock_us, prefix_us = medians_us([stock, prefix])
        return stock_us, prefix_us

    def prefix_us(self, plan: StepPlan, paths: PathTable) -> float:
        """Time any plan over the KV of `paths`; its results are not looked at."""
        slots, num_slots = slots_of(paths, self.page_size, self.device)
        return self._prefix_timer(plan, paths, slots, self._layers(num_slots)).us()

    def _layers(self, num_slots: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cut K and V of as many layers from the arena as it takes to leave the L2 cache."""
        size = num_slots * self._k[0].nbytes * 2
        count = max(2, min(_MAX_LAYERS, int(_COLD_BYTES // size) + 1, len(self._k) // num_slots))
        parts = [slice(i * num_slots, (i + 1) * num_slots) for i in range(count)]
        return [(self._k[part], self._v[part]) for part in parts]

    def _prefix_timer(self, plan: StepPlan, paths: PathTable, slots, layers) -> LayerTimer:
        q = self._q[: paths.seq_lens.size]
        outs = [torch.empty_like(q) for _ in layers]
        seq_lens = torch.from_numpy(paths.seq_lens).to(self.device)
        rows = torch.arange(paths.seq_lens.size, device=self.device)
        self._executor.load(plan, slots, rows)

        def run(layer: int) -> torch.Tensor:
            k, v = layers[layer]
            sm_scale = self.heads.head_dim**-0.5
            self._executor.run(LayerParams(q, k, v, seq_lens, outs[layer], None, sm_scale, 0.0))
            return outs[layer]

        return LayerTimer(run, len(layers), self.device, True)

    def _stock_timer(self, batch: Batch, slots, layers) -> LayerTimer:
        """Plan FlashInfer's decode as SGLang does: pages of one token, CUDA-graph mode."""
        import flashinfer

        seq_lens = torch.from_numpy(batch.paths.seq_lens.astype(np.int64))
        indptr = torch.zeros(batch.size + 1, dtype=torch.int32)
        indptr[1:] = seq_lens.cumsum(0)
        columns = torch.arange(slots.shape[1], device=self.device)
        indices = slots[columns[None, :] < seq_lens.to(self.device)[:, None]]
        last = torch.ones(batch.size, dtype=torch.int32)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._stock_workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores(self.heads, self.dtype),
            paged_kv_indptr_buffer=indptr.to(self.device),
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last.to(self.device),
        )
        shape = self.heads.num_qo_heads, self.heads.num_kv_heads, self.heads.head_dim
        dtypes = {"q_data_type": self.dtype, "kv_data_type": self.dtype}
        wrapper.plan(indptr, indices, last, *shape, 1, **dtypes)
        q = self._q[: batch.size]
        outs = [torch.empty_like(q) for _ in layers]

        def run(layer: int) -> torch.Tensor:
            k, v = layers[layer]
            return wrapper.run(q, (k.unsqueeze(1), v.unsqueeze(1)), out=outs[layer])

        return LayerTimer(run, len(layers), self.device, True)


def _executor(
    planner: Planner | RowTilePlanner,
    dtype: torch.dtype,
    device: torch.device,
    max_batch: int,
    pool_tokens: int,
) -> PlanExecutor:
    """Make what runs the planner's plans in a server with such a pool."""
    heads, headroom = planner.heads, planner.headroom
    if isinstance(planner, RowTilePlanner):
        row_tiles = row_tile_backend(device, heads, dtype)
        capacity = row_tiles.server_capacity(max_batch, pool_tokens, headroom)
        return PlanExecutor(row_tiles, capacity)
    tile_set = planner.tile_set
    capacity = Capacity.for_server(max_batch, pool_tokens, headroom, tile_set, heads)
    return PlanExecutor(new_backend(device, heads, dtype, tile_set), capacity)


def tensor_cores(heads: HeadConfig, dtype: torch.dtype) -> bool:
    """Say whether SGLang lets FlashInfer decode with tensor cores, as should_use_tensor_core of
    0.5.17 to 0.5.23 does."""
    return on_tensor_cores(heads) and dtype in (torch.float16, torch.bfloat16)


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
