"""One row for each held-out batch: its facts, what was measured, what the policy made of it.

Lengths are in KV tokens, times in microseconds per layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from sgl_prefix_attn.calibrate.batches import Batch
from sgl_prefix_attn.records import Decision


def measure(seed: int, batches: list[Batch], meter) -> Iterator[dict]:
    """Yield the facts and times of each batch; one that fails keeps its place, with its error.

    meter: the calibration's BatchMeter. Times are None where there is an error.
    """
    for index, batch in enumerate(batches):
        stock_us = prefix_us = error = None
        try:
            stock_us, prefix_us = meter.measure(batch)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        lens = batch.paths.seq_lens
        yield {
            "seed": seed,
            "index": index,
            "name": batch.name,
            "batch_size": batch.size,
            "min_len": int(lens.min()),
            "mean_len": float(lens.mean()),
            "max_len": int(lens.max()),
            "tokens": batch.tokens,
            "unique": batch.unique_tokens,
            "shared_share": batch.shared_share,
            "stock_us": stock_us,
            "prefix_us": prefix_us,
            "error": error,
        }


def decided(decision: Decision) -> dict:
    """Return the part of a row that depends on the calibration."""
    return {
        "predicted_stock_us": decision.predicted.stock_us,
        "predicted_prefix_us": decision.predicted.prefix_us,
        "variant": decision.variant,
        "reason": decision.reason,
    }
