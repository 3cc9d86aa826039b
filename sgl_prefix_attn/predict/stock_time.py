"""Microseconds per layer of a stock backend's decode, from how much work a step is for it.

FlashInfer splits long requests so that all pieces run at once, as many CTAs per SM as there is room
for; a batch that fills the GPU with whole requests is not split, and then it matters which requests
its CTAs get: they take the pieces of the first KV head in the batch's order, then those of the
next. FlashAttention 3 has one CTA per SM, and splits each request whose tiles are more than an SM's
share of all, a tenth added, into equal pieces.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.records import FA3, FLASHINFER, HeadConfig

# Query heads a KV head from which SGLang lets it use tensor cores.
TENSOR_CORE_GROUP = 4
SHORTEST_PIECE = 128  # KV tokens
# Rows that kernels over latent KV multiply at once, however few heads there are.
_LATENT_ROWS = 64
# Bytes of KV that a CTA streams in a microsecond while it has the memory to itself.
_CHAIN_BANDWIDTH = 35e3


@dataclass(frozen=True)
class StockKernel:
    """A stock backend's decode kernel, on Hopper.

    rows   of queries that a CTA multiplies at once on tensor cores, 0 without them
    ctas   that run at once on a multiprocessor
    tile   KV tokens that a CTA loads at once; one that is not full takes as long
    piece  what a piece costs a CTA besides its KV, in KV tokens of one head
    shares  requests are split by an SM's share of all tiles, whatever the batch
    """

    rows: int
    ctas: int
    tile: int
    piece: int
    shares: bool = False


def on_tensor_cores(heads: HeadConfig, kv_bytes: int = 2) -> bool:
    """Return whether SGLang lets FlashInfer decode such heads, with KV of so many bytes an element,
    with tensor cores."""
    return heads.group_size >= TENSOR_CORE_GROUP or kv_bytes == 1


def stock_kernel(heads: HeadConfig, fallback: str = FLASHINFER, kv_bytes: int = 2) -> StockKernel:
    """Return the kernel of a stock backend that decodes such heads. A backend of which nothing is
    known is taken for FlashInfer.

    FlashInfer: without tensor cores each query head has threads of its own, which load 16 bytes of
    K or V each, and 128 of them, or nearly so, are a CTA. A single query head loads four times as
    much at once, so that there is shared memory for six CTAs.
    """
    group, head_dim = heads.group_size, heads.head_dim
    if fallback == FA3:
        return StockKernel(128, ctas=1, tile=128 if head_dim <= 128 else 80, piece=100, shares=True)
    if heads.latent_dim:
        return StockKernel(-(-group // _LATENT_ROWS) * _LATENT_ROWS, ctas=1, tile=64, piece=100)
    if on_tensor_cores(heads, kv_bytes):
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
    ("bandwidth", 1.0, 0.3, 4.0),  # of unique KV, times KvCosts.token
    ("reread", 0.1, 0.0, 4.0),  # the same of KV read again, mostly from the L2 cache
    ("chain", 1.0, 0.05, 20.0),  # token of the longest chain, times KvCosts.chain
    ("norm", 2.0, 1.0, 20.0),
)


def measured_beside(heads: HeadConfig, kv_bytes: int) -> tuple[str, ...]:
    """Name the stock backends beside which such layers are measured: FlashInfer decodes no latent
    ones in a server, and FlashAttention 3 rounds queries to e4m3, too, so that its results are
    others."""
    lacks = {FLASHINFER: heads.latent_dim is not None, FA3: kv_bytes == 1}
    return tuple(name for name in lacks if kv_bytes <= 2 and not lacks[name])


def stock_start(
    heads: HeadConfig, fallback: str = FLASHINFER, kv_bytes: int = 2
) -> dict[str, float]:
    """Return coefficients to begin a fit with, and to predict by where nothing was measured, for
    such heads and KV of so many bytes an element.

    Those over latent and e4m3 KV are fits to eval/results/latent_h100.json and
    kernel_h100_e4m3.json: 3 to 5 % off, root mean square. Converting e4m3 is what takes the time.
    """
    start = {name: value for name, value, *_ in STOCK_COEFFICIENTS}
    if fallback == FA3:  # whose CTAs have an SM each, and stream faster
        start |= {"launch": 8.0, "chain": 0.62, "norm": 4.0}
        if heads.latent_dim:
            start |= {"bandwidth": 1.11, "reread": 0.312, "chain": 0.843}
        elif kv_bytes == 1:
            start |= {"bandwidth": 1.39, "reread": 0.879, "chain": 1.0}
    elif kv_bytes == 1:
        start |= {"cta": 0.0266, "reread": 0.296, "chain": 2.69}
    return start


@dataclass(frozen=True)
class KvCosts:
    """Microseconds of one KV token, before any coefficient.

    token  to gather it, of all KV heads, at the GPU's bandwidth
    chain  of one CTA, for one head of it, while the memory is idle
    """

    token: float
    chain: float
    num_kv_heads: int

    @classmethod
    def of(cls, bandwidth: float, heads: HeadConfig, kv_bytes: int) -> KvCosts:
        """Return those of a bandwidth in bytes/us and KV of so many bytes an element."""
        return cls(
            token=heads.num_kv_heads * heads.token_dim * kv_bytes / bandwidth,
            chain=heads.token_dim * kv_bytes / _CHAIN_BANDWIDTH,
            num_kv_heads=heads.num_kv_heads,
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


def stock_work(
    seq_lens: np.ndarray,
    unique: int,
    num_sms: int,
    heads: HeadConfig,
    fallback: str = FLASHINFER,
    kv_bytes: int = 2,
) -> StockWork:
    """Count the work of a step with lengths seq_lens int [B] of which `unique` tokens differ, over
    KV of so many bytes an element."""
    kernel = stock_kernel(heads, fallback, kv_bytes)
    slots = kernel.ctas * num_sms
    if kernel.shares:
        cost = _shared_out(seq_lens, num_sms / heads.num_kv_heads, kernel.tile, kernel.piece)
    else:
        cost = _piece_costs(
            seq_lens, max(1, slots // heads.num_kv_heads), kernel.tile, kernel.piece
        )
    return StockWork(
        batch_size=seq_lens.size,
        tokens=int(seq_lens.sum()),
        unique=unique,
        pieces=cost.size,
        chain=_run_queue(cost, heads.num_kv_heads, slots),
    )


def stock_physical(c, work: StockWork, costs: KvCosts) -> float:
    """Predict microseconds per layer with coefficients c, as STOCK_COEFFICIENTS names them."""
    launch, split, cta, bandwidth, reread, chain, norm = c
    memory = costs.token * (bandwidth * work.unique + reread * (work.tokens - work.unique))
    busiest = chain * work.chain * costs.chain
    return (
        launch
        + split * (work.pieces > work.batch_size)
        + cta * work.pieces * costs.num_kv_heads
        + (memory**norm + busiest**norm) ** (1 / norm)
    )


@cached_njit
def _piece_costs(lens, slots, tile, piece):
    """What each piece costs a CTA, float [n], in KV tokens: request after request, split as
    FlashInfer does."""
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
    cost = np.empty(count)
    i = 0
    for n in lens:
        for start in range(0, n, low):
            tiles = (min(low, n - start) + tile - 1) // tile
            cost[i] = tiles * tile + piece
            i += 1
    return cost


def _shared_out(lens: np.ndarray, slots: float, tile: int, piece: int) -> np.ndarray:
    """The same, split as FlashAttention 3 does: `slots` are SMs per KV head."""
    tiles = -(-lens // tile)
    share = max(1, math.ceil(1.1 * tiles.sum() / slots))  # tiles of an SM
    pieces = -(-tiles // share)
    each = -(-tiles // pieces)
    cost = np.repeat(each * tile + piece, pieces).astype(float)
    cost[pieces.cumsum() - 1] -= (pieces * each - tiles) * tile  # the last one has what is left
    return cost


@cached_njit
def _run_queue(cost, repeats, slots):
    """Return when the last piece of work is done, if each goes to that one of `slots` CTAs which is
    free first: cost float [n] of the pieces in their order, all handed out `repeats` times."""
    heap = [0.0] * slots  # when each CTA is free
    last = 0.0
    for _ in range(repeats):
        for piece in cost:
            end = heap[0] + piece
            heapq.heapreplace(heap, end)
            last = max(last, end)
    return last
