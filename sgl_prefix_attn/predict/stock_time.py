"""Microseconds per layer of FlashInfer's decode, from how much work a step is for it.

FlashInfer splits long requests so that all pieces run at once, two CTAs per SM; a batch that fills
the GPU with whole requests is not split, and then it matters which requests its CTAs get: they take
the pieces of the first KV head in the batch's order, then those of the next. The terms of its time
are like those of a plan (plan/estimate.py).
"""

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.costs import CostModel
from sgl_prefix_attn.plan.work import run_queue

CTAS = 2  # per multiprocessor
# Query heads a KV head from which SGLang lets it use tensor cores, in kernels of their own.
TENSOR_CORE_GROUP = 4
SHORTEST_PIECE = 128  # KV tokens
# KV tokens that a CTA loads at once, for heads of 128; a tile that is not full takes as long.
KV_TILE = 128
# What a piece costs a CTA besides its KV, in KV tokens of one head.
PIECE_TOKENS = 100

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


def stock_work(seq_lens: np.ndarray, unique: int, num_sms: int, num_kv_heads: int) -> StockWork:
    """Count the work of a step with lengths seq_lens int [B] of which `unique` tokens differ."""
    tokens, cost = _piece_costs(seq_lens, max(1, CTAS * num_sms // num_kv_heads))
    return StockWork(
        batch_size=seq_lens.size,
        tokens=tokens,
        unique=unique,
        pieces=cost.size,
        chain=run_queue(cost, num_kv_heads, np.zeros(CTAS * num_sms)),
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
def _piece_costs(lens, slots):
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
            tiles = (min(low, n - start) + KV_TILE - 1) // KV_TILE
            cost[i] = tiles * KV_TILE + PIECE_TOKENS
            i += 1
    return tokens, cost
