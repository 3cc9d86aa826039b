"""A decode batch of any lengths on the device, and the judgement of outputs over it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from eval.bench_kernel import case as trees
from eval.bench_kernel.oracle import RowJudge, attend_rows
from eval.papers.counts import kv_bytes
from sgl_prefix_attn.calibrate.batches import Batch
from sgl_prefix_attn.calibrate.measure import slots_of
from sgl_prefix_attn.records import HeadConfig

# A graph cycles through this much KV, so that no layer finds its own in the L2 cache.
_POOL_BYTES, _MOST_POOLS = 400e6, 12
_JUDGED = 12  # requests of a layer


@dataclass(frozen=True)
class Shape:
    """What stock providers ask of a tree: requests, and KV tokens of the longest."""

    batch_size: int
    seq_len: int


@dataclass(frozen=True)
class Case(trees.Case):
    """A benchmark case whose requests may differ in length; `tree` is its shape alone.

    req_to_token int32 [B, longest]; what lies behind a request's length is a slot that holds NaN
    """

    batch: Batch


def build(
    batch: Batch, heads: HeadConfig, page_size: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """Draw queries and pools; pages lie in random order, slots that no request owns hold NaN."""
    table, num_slots = slots_of(batch.paths, page_size, device)
    lengths = torch.from_numpy(batch.paths.seq_lens).to(device)
    inside = torch.arange(table.shape[1], device=device) < lengths[:, None]
    table = torch.where(inside, table + page_size, 0).to(torch.int32)  # page 0 is nobody's
    num_slots += page_size
    is_unused = torch.ones(num_slots, dtype=torch.bool, device=device)
    is_unused[table[inside].long()] = False
    unused = is_unused.nonzero()[:, 0]
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    layers = max(2, min(_MOST_POOLS, int(_POOL_BYTES // kv_bytes(batch.unique_tokens, heads)) + 1))
    shape = (num_slots, heads.num_kv_heads, heads.head_dim)
    pools = [random(*shape).index_fill_(0, unused, float("nan")) for _ in range(2 * layers)]
    return Case(
        tree=Shape(batch.size, int(batch.paths.seq_lens.max())),
        heads=heads,
        page_size=page_size,
        dtype=dtype,
        device=device,
        node_slots=(),
        req_to_token=table,
        seq_lens=lengths,
        q=random(batch.size, heads.num_qo_heads, heads.head_dim),
        k=tuple(pools[:layers]),
        v=tuple(pools[layers:]),
        batch=batch,
    )


class Judge(RowJudge):
    """Judges one layer's output by full attention of some requests in fp64, the shortest and the
    longest among them."""

    def __init__(self, case: Case, layer: int):
        order = np.argsort(case.batch.paths.seq_lens, kind="stable")
        picks = np.unique(np.linspace(0, order.size - 1, min(_JUDGED, order.size)).astype(int))
        requests = order[picks]

        def attend(score_dtype: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
            return torch.cat([self._attend(case, layer, i, score_dtype, dtype) for i in requests])

        super().__init__(
            torch.from_numpy(requests).to(case.device),
            attend(torch.float64, torch.float64),
            attend(torch.float32, case.dtype),
        )

    @staticmethod
    def _attend(case: Case, layer: int, i: int, score_dtype, dtype) -> torch.Tensor:
        slots = case.req_to_token[i : i + 1, : int(case.batch.paths.seq_lens[i])]
        k, v = case.k[layer], case.v[layer]
        return attend_rows(case.q[i : i + 1], k, v, slots, case.sm_scale, score_dtype, dtype)
