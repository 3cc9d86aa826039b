"""One row a held-out batch: its facts, what was measured, what the policy made of it.

draw -> measure -> Measured -> row
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eval.policy_holdout.looks import Look
from sgl_prefix_attn.calibrate.batches import Batch


@dataclass(frozen=True)
class Measured:
    """Batch `index` of batches.draw(seed, ...); size and tokens prove that it is drawn alike later.

    Microseconds a layer, or None and the error that measuring ended in.
    """

    seed: int
    index: int
    size: int
    tokens: int
    stock_us: float | None
    prefix_us: float | None
    error: str | None

    @classmethod
    def from_row(cls, row: dict) -> Measured:
        times = (row[name] for name in ("stock_us", "prefix_us", "error"))
        return cls(row["seed"], row["index"], row["batch_size"], row["tokens"], *times)

    def check(self, batch: Batch) -> None:
        """Raises ValueError if another batch was measured."""
        change = batch.change_since(self.size, self.tokens)
        if change is not None:
            raise ValueError(f"batch {self.index} of seed {self.seed} {change}: measure again")


def measure(seed: int, batches: list[Batch], meter) -> Iterator[Measured]:
    """meter: calibration.measure.BatchMeter. A batch that fails keeps its place, with its error."""
    for index, batch in enumerate(batches):
        us, error = (None, None), None
        try:
            times = meter.measure(batch)
            us = times.stock_us, times.prefix_us
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        yield Measured(seed, index, batch.size, batch.tokens, *us, error)


def row(batch: Batch, measured: Measured, look: Look) -> dict:
    """Lengths in KV tokens, times in microseconds a layer."""
    lens = batch.paths.seq_lens
    return {
        "seed": measured.seed,
        "index": measured.index,
        "name": batch.name,
        "batch_size": batch.size,
        "min_len": int(lens.min()),
        "mean_len": float(lens.mean()),
        "max_len": int(lens.max()),
        "tokens": measured.tokens,
        "unique": batch.unique_tokens,
        "shared_share": batch.shared_share,
        "stock_us": measured.stock_us,
        "prefix_us": measured.prefix_us,
        "error": measured.error,
        "predicted_stock_us": look.predicted.stock_us,
        "predicted_prefix_us": look.predicted.prefix_us,
        "planned": look.planned,
        "variant": look.decision.variant,
        "reason": look.decision.reason,
    }
