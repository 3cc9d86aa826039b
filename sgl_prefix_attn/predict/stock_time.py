"""Microseconds per layer of FlashInfer's decode, from how much work a step is for it.

FlashInfer splits long requests so that all pieces run at once, as many CTAs per SM as there is room
for; a batch that fills the GPU with whole requests is not split, and then it matters which requests
its CTAs get: they take the pieces of the first KV head in the batch's order, then those of the
next. The terms of its time are like those of a plan (plan/estimate.py).
"""

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.work import run_queue
from sgl_prefix_attn.records import HeadConfig

# Query heads a KV head from which SGLang lets it use tensor cores.
TENSOR_CORE_GROUP = 4
SHORTEST_PIECE = 128  # KV tokens


@dataclass(frozen=True)
class StockKernel:
    """One of FlashInfer's decode kernels, on Hopper.

    rows   of queries that a CTA multiplies at once on tensor cores, 0 without them
    ctas   that run at once on a multiprocessor
    tile   KV tokens that a CTA loads at once; one that is not full takes as long
    piece  what a piece costs a CTA besides its KV, in KV tokens of one head
    """

    rows: int
    ctas: int
    tile: int
    piece: int


def on_tensor_cores(heads: HeadConfig) -> bool:
    """Return whether SGLang lets FlashInfer decode such heads of 16 bits with tensor cores."""
    return heads.group_size >= TENSOR_CORE_GROUP


def stock_kernel(heads: HeadConfig) -> StockKernel:
    """Return the kernel that decodes such heads.

    Without tensor cores each query head has threads of its own, which load 16 bytes of K or V each,
    and 128 of them, or nearly so, are a CTA. A single query head loads four times as much at once,
    so that there is shared memory for six CTAs.
    """
    group, head_dim = heads.group_size, heads.head_dim
    if on_tensor_cores(heads):
        rows = 16 if group <= 16 else 64 if group <= 64 else 128
        return StockKernel(rows, ctas=2, tile=max(1, 128 * 128 // head_dim), piece=100)
    tokens = group * max(1, 128 * 8 // (head_dim * group))
    if group == 1:
        return StockKernel(0, ctas=6, tile=4 * tokens, piece=30)
    return StockKernel(0, ctas=8, tile=tokens, piece=30)


# Name, start, lowest, highest of every coefficient, in the order of stock_physical's formula.
STOCK_COEFFICIENTS = (
    ("launch", 7.0, 0.0, 50.0),  # us
    ("split", 0.1, -5.0, 20.0),  # us, when requests are split and merged
    ("cta", 0.0125, 0.0, 0.25),  # us per CTA, a piece of one KV head
    ("bandwidth", 1.0, 0.3, 4.0),  # of unique KV, times the cost model's
    ("reread", 0.1, 0.0, 4.0),  # the same of KV read again, mostly from the L2 cache
    ("chain", 1.0, 0.05, 20.0),  # token of the longest chain, times the cost model's
    ("norm", 2.0, 1.0, 20.0),
)


@dataclass(frozen=True)
class StockWork:
    """tokens: KV tokens that the batch reads; unique: each shared one counted once; pieces: CTAs
    per KV head; chain: KV tokens of one head on the busiest CTA, in whole tiles, fixed costs
    included."""

    batch_size: int
    tokens: int
    unique: int
    pieces: int
    chain: float


def stock_work(seq_lens: np.ndarray, unique: int, num_sms: int, heads: HeadConfig) -> StockWork:
    """Count the work of a step with lengths seq_lens int [B] of which `unique` tokens differ."""
    kernel = stock_kernel(heads)
    slots = kernel.ctas * num_sms
    tokens, cost = _piece_costs(
        seq_lens, max(1, slots // heads.num_kv_heads), kernel.tile, kernel.piece
    )
    return StockWork(
        batch_size=seq_lens.size,
        tokens=tokens,
        unique=unique,
        pieces=cost.size,
        chain=run_queue(cost, heads.num_kv_heads, np.zeros(slots)),
    )


def stock_physical(c, work: StockWork, costs: CostModel) -> float:
    """Predict microseconds per layer with coefficients c, as STOCK_COEFFICIENTS names them."""
    launch, split, cta, bandwidth, reread, chain, norm = c
    memory = costs.kv_token * (bandwidth * work.unique + reread * (work.tokens - work.unique))
    busiest = chain * work.chain * costs.chain
    return (
        launch
        + split * (work.pieces > work.batch_size)
        + cta * work.pieces * costs.num_kv_heads
        + (memory**norm + busiest**norm) ** (1 / norm)
    )


@cached_njit
def _piece_costs(lens, slots, tile, piece):
    """KV tokens of all requests, and what each piece costs a CTA, float [n], in KV tokens: request
    after request, split as FlashInfer does."""
    high = max(lens.max(), SHORTEST_PIECE)
    low = SHORTEST_PIECE if lens.size <= slots else high  # as many requests as slots: no split
    while low < high:
        middle = (low + high) // 2
        count = 0
        for n in lens:
            count += (n + middle - 1) // middle
        if count > slots:
            low = middle + 1
        else:
            high = middle
    tokens, count = 0, 0
    for n in lens:
        tokens += n
        count += (n + low - 1) // low
    cost = np.empty(count)
    i = 0
    for n in lens:
        for start in range(0, n, low):
            tiles = (min(low, n - start) + tile - 1) // tile
            cost[i] = tiles * tile + piece
            i += 1
    return tokens, cost
