"""How much work a decode step is for FlashInfer: what its time is predicted from.

FlashInfer splits long requests so that all pieces run at once, two CTAs an SM; a batch that fills
the GPU with whole requests is not split, and then it matters which requests its CTAs get: they take
the pieces of the first KV head in the batch's order, then those of the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.plan.work import run_queue

CTAS = 2  # a multiprocessor
SHORTEST_PIECE = 128  # KV tokens
# KV tokens that a CTA loads at once, for heads of 128; a tile that is not full takes as long.
KV_TILE = 128
# What a piece costs a CTA besides its KV, in KV tokens of one head.
PIECE_TOKENS = 100


@dataclass(frozen=True)
class StockWork:
    """tokens: KV tokens that the batch reads; unique: each shared one counted once; longest: of
    one request; pieces: CTAs a KV head; chain: KV tokens of one head on the busiest CTA, in whole
    tiles, fixed costs included."""

    batch_size: int
    tokens: int
    unique: int
    longest: int
    pieces: int
    chain: float


def stock_work(seq_lens: np.ndarray, unique: int, num_sms: int, num_kv_heads: int) -> StockWork:
    """Work of a decode step with lengths seq_lens int [B] of which `unique` tokens differ."""
    lens = seq_lens.astype(np.int64)
    pieces = _pieces(lens, max(1, CTAS * num_sms // num_kv_heads))
    cost = -(-pieces // KV_TILE) * KV_TILE + PIECE_TOKENS
    return StockWork(
        batch_size=lens.size,
        tokens=int(lens.sum()),
        unique=unique,
        longest=int(lens.max()),
        pieces=pieces.size,
        chain=run_queue(cost, num_kv_heads, np.zeros(CTAS * num_sms)),
    )


@cached_njit
def _pieces(lens, slots):
    """float [n]: KV tokens of each piece, request after request as FlashInfer hands them out."""
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
    count = 0
    for n in lens:
        count += (n + low - 1) // low
    pieces = np.empty(count, np.float64)
    i = 0
    for n in lens:
        for start in range(0, n, low):
            pieces[i] = min(low, n - start)
            i += 1
    return pieces
