"""Microseconds per layer of stock prefill attention, by rates: what a multi-token plan must beat.

FlashAttention 3, as FlashInfer, puts a request's rows (its new tokens times the query heads of a KV
head) into tiles and reads all of the request's KV for each of them: arithmetic of whole tiles, or
their gathering from the L2 cache, or the distinct KV from memory, whichever takes longest.
"""

from dataclasses import dataclass

import numpy as np

from sgl_prefix_attn.records import HeadConfig

# Rows of a tile, and above how many rows a request on average it is taken.
_TILES = ((64, 128), (16, 64), (0, 16))
# A tile of fewer rows takes as long: its products are of 64.
_LEAST_ROWS = 64


@dataclass(frozen=True)
class PrefillRates:
    """What FlashAttention 3 reaches on a Hopper GPU with 16-bit KV at page size 1; per microsecond.

    flops  of whole tiles; l2, hbm  bytes gathered from the cache and from memory
    fixed  microseconds of a layer, however little there is to do

    The best of nine workloads on an H200 (eval/results/multi_token_h200.json), which take 0.99 to
    1.15 times the prediction: a batch is given to a plan only where it gains for sure.
    """

    flops: float = 6.1e8
    l2: float = 6.5e6
    hbm: float = 4.0e6
    fixed: float = 8.0


class PrefillTime:
    """Predicts stock prefill for the heads of one layer; 16-bit KV."""

    def __init__(self, heads: HeadConfig, rates: PrefillRates | None = None):
        self._heads = heads
        self._rates = rates or PrefillRates()

    def stock(self, seq_lens: np.ndarray, query_lens: np.ndarray, unique: int) -> float:
        """Predict a batch of seq_lens int [B] whose query_lens int [B] newest tokens attend;
        `unique` counts each shared token once."""
        heads, rates = self._heads, self._rates
        rows = query_lens.astype(np.int64) * heads.group_size
        tile = next(size for above, size in _TILES if rows.mean() > above)
        tiles = -(-rows // tile)
        # a tile in the middle of a request's new tokens sees half of them
        sees = seq_lens - query_lens * (1 - 1 / tiles) / 2
        read = float((tiles * sees).sum())
        token_bytes = 4.0 * heads.head_dim * heads.num_kv_heads
        products = 4.0 * heads.head_dim * heads.num_kv_heads * max(tile, _LEAST_ROWS)
        return rates.fixed + max(
            read * products / rates.flops,
            read * token_bytes / rates.l2,
            unique * token_bytes / rates.hbm,
        )
