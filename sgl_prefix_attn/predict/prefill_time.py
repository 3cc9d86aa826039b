"""Microseconds per layer of stock prefill attention, by rates: what a multi-token plan must beat.

FlashAttention 3, as FlashInfer, puts a request's rows (its new tokens times the query heads of a KV
head) into tiles and reads all of the request's KV for each of them: arithmetic of whole tiles, or
their gathering from the L2 cache, or the distinct KV from memory, whichever takes longest.
"""

from typing import Any

import numpy as np

from sgl_prefix_attn.plan.plan import Plan
from sgl_prefix_attn.records import HeadConfig

# Rows of a tile, and above how many rows a request on average it is taken.
_TILES = ((64, 128), (16, 64), (0, 16))
# A tile of fewer rows takes as long: its products are of 64.
_LEAST_ROWS = 64
# What FlashAttention 3 reaches on a Hopper GPU with 16-bit KV at page size 1: operations of whole
# tiles and bytes gathered from the L2 cache and from memory, a microsecond; and the microseconds of
# a layer, however little there is to do. The best of nine workloads on an H200
# (eval/results/multi_token_h200.json), which take 0.99 to 1.15 times the prediction: a batch is
# given to a plan only where it gains for sure.
_FLOPS, _L2, _HBM, _FIXED = 6.1e8, 6.5e6, 4.0e6, 8.0


class PrefillTime:
    """Predicts stock prefill for the heads of one layer, 16-bit KV, beside plans."""

    def __init__(self, heads: HeadConfig, source: str = "measured"):
        self.source = source
        self._heads = heads

    def stock(self, seq_lens: np.ndarray, unique: int, query_lens: Any = None) -> float:
        """Predict a batch of seq_lens int [B] whose query_lens int [B] newest tokens attend;
        `unique` counts each shared token once."""
        heads = self._heads
        rows = query_lens.astype(np.int64) * heads.group_size
        tile = next(size for above, size in _TILES if rows.mean() > above)
        tiles = -(-rows // tile)
        # a tile in the middle of a request's new tokens sees half of them
        sees = seq_lens - query_lens * (1 - 1 / tiles) / 2
        read = float((tiles * sees).sum())
        token_bytes = 2.0 * heads.token_dim * heads.num_kv_heads
        products = (
            2.0 * (heads.head_dim + heads.value_dim) * heads.num_kv_heads * max(tile, _LEAST_ROWS)
        )
        return _FIXED + max(
            read * products / _FLOPS,
            read * token_bytes / _L2,
            unique * token_bytes / _HBM,
        )

    def prefix(self, plan: Plan) -> float:
        """Return the time of a plan that was made with the calibration's rates."""
        return plan.predicted_us
