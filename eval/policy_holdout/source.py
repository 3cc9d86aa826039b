"""The calibration that is judged, and the seeds that it has seen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_prefix_attn.predict import store
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey

# Calibrations draw their batches from these (the command's default is 0, shipped ones included).
CALIBRATION_SEEDS = range(0, 101)


@dataclass(frozen=True)
class Source:
    """origin: where the calibration was found."""

    calibration: Calibration
    origin: str

    @property
    def seed(self) -> int | None:
        """Of the batches behind it, None where nothing was measured."""
        return self.calibration.origin and self.calibration.origin.seed

    def refuse(self, seeds: list[int]) -> None:
        """Raises ValueError unless all seeds are held out."""
        for seed in seeds:
            if seed in CALIBRATION_SEEDS:
                raise ValueError(
                    f"seed {seed} is not held out: {CALIBRATION_SEEDS.start} to "
                    f"{CALIBRATION_SEEDS[-1]} are for calibrations"
                )
            if seed == self.seed:
                raise ValueError(f"seed {seed} is not held out: the calibration was made with it")

    @property
    def meta(self) -> dict:
        """What a result file says about it."""
        found = self.calibration
        return {
            "origin": self.origin,
            "source": found.source,
            "seed": self.seed,
            "samples": found.samples,
            "errors": found.errors,
            "versions": found.versions,
            "rates": asdict(found.rates),
        }


def find(path: Path | None, key: CalibrationKey, num_sms: int) -> Source:
    """The calibration in a file, or the one that a server for `key` would use.

    Raises ValueError for a file that cannot be used.
    """
    if path is not None:
        return Source(store.load(path, key), str(path))
    found = store.find(key, num_sms)
    return Source(found.calibration, found.message)
