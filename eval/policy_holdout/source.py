"""The calibration that is judged, and the seeds that it has seen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_prefix_attn.calibration import samples, store
from sgl_prefix_attn.calibration.record import Calibration, CalibrationKey

# Calibrations draw their batches from these (the command's default is 0, shipped ones included).
CALIBRATION_SEEDS = range(0, 101)


@dataclass(frozen=True)
class Source:
    """origin: where the calibration comes from; seed: of its samples, None where no file says."""

    calibration: Calibration
    origin: str
    seed: int | None

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
        return Source(store.load(path, key), str(path), _seed_beside(path))
    found = store.find(key, num_sms)
    seed = None
    if found.calibration.source == "measured":
        seed = _seed_beside(store.cache_folder() / store.file_name(key, store.versions()))
    return Source(found.calibration, found.message, seed)


def _seed_beside(path: Path) -> int | None:
    """`sgl-prefix-attn calibrate` leaves its samples beside the file that it writes."""
    beside = path.with_suffix(".samples.jsonl")
    return samples.read(beside).task.seed if beside.exists() else None
