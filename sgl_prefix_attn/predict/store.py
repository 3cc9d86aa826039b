"""Where calibrations lie: one JSON file each, in a cache folder of the user and shipped ones.

Files are compared by what is in them; a file's name only tells where to look.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from sgl_prefix_attn.jit import user_cache
from sgl_prefix_attn.predict.carry_over import from_shipped
from sgl_prefix_attn.predict.codec import CalibrationError, decode
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey
from sgl_prefix_attn.predict.stock_time import measured_beside
from sgl_prefix_attn.records import FA3, FLASHINFER

SHIPPED = Path(__file__).with_name("shipped")
# Packages whose kernels are measured, or that compile ours. Not our own: that is the key's kernels.
_PACKAGES = ("torch", "triton", "flashinfer-python", "sglang")


def versions() -> dict[str, str]:
    """Return the version of every package that times depend on; "absent" without one."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return `calibration` in user_cache(), None where there is none."""
    cache = user_cache(environ)
    return None if cache is None else cache / "calibration"


def verdict_folder() -> Path | None:
    """Return where verdicts of the kernels' self-test lie, next to cache_folder(); None as
    there."""
    folder = cache_folder()
    return None if folder is None else folder.with_name("self_test")


def file_name(key: CalibrationKey) -> str:
    """Name the file that `calibrate` writes."""
    beside = "" if key.fallback == FLASHINFER else f"_{key.fallback}"
    return f"{_stem(key)}_{key.family}{beside}_kernels{key.kernels}.json"


def _stem(key: CalibrationKey) -> str:
    """How the names of all files of these layers begin, whatever kernels they are for. Files of
    earlier formats, which are refused and named, name no family; those of version 0.1.2 end with a
    digest of versions."""
    gpu = re.sub(r"[^A-Za-z0-9.]+", "-", key.gpu).strip("-")
    return f"{gpu}_{key.heads.shape}_{key.dtype}_page{key.page_size}"


def load(path: Path, key: CalibrationKey | None = None) -> Calibration:
    """Read a file.

    Raises CalibrationError that names the file and why it is refused: unreadable, truncated, of
    another format, inconsistent, or for another key than `key`.
    """
    try:
        calibration = decode(path.read_bytes())
    except (OSError, CalibrationError) as error:
        raise CalibrationError(f"{path}: {error}") from error
    if key is not None and calibration.key != key:
        raise CalibrationError(f"{path}: it is for {calibration.key}")
    return calibration


@dataclass(frozen=True)
class Folders:
    cache: Path | None
    shipped: Path

    @classmethod
    def default(cls) -> Folders:
        return cls(cache_folder(), SHIPPED)


@dataclass(frozen=True)
class Found:
    """message: one line for the log, what is used and what is wrong with it or was refused;
    warning: whether there is such a thing, or nothing that was measured on this GPU."""

    calibration: Calibration
    message: str
    warning: bool


def find(
    key: CalibrationKey,
    num_sms: int,
    package_versions: Mapping[str, str] | None = None,
    folders: Folders | None = None,
) -> Found:
    """Find the best calibration that there is for `key`, by source:

    measured      a cache file of the key; of several that with the fewest other versions
    judged        shipped, and batches that no fit has seen have judged both predicted times
    shipped       of this GPU, dtype and kernels, for heads like these; the page size may differ
    scaled        shipped for another dtype, or for another GPU, with this one's bandwidth
    conservative  shipped for heads unlike these; without any file of this GPU and fallback its
                  bandwidth by name, and coefficients and rates of a shipped H100 or the tables' own

    Versions that differ from package_versions (default: those installed) are a warning. The search
    goes on behind files that are refused; the message names them unless a measurement is used.
    """
    here = versions() if package_versions is None else package_versions
    folders = folders or Folders.default()
    refused: list[str] = []
    measured = _measured(folders.cache, key, num_sms, refused)
    if measured:
        path = min(measured, key=lambda path: _preference(path, measured[path], here))
        found = replace(measured[path], source="measured")
        return _found(found, f"measured on this machine ({path}, {found.origin})", here, [])
    shipped = _read(sorted(folders.shipped.glob("*.json")), refused)
    return _found(*from_shipped(shipped, key, num_sms), here, refused)


def _found(found: Calibration, what: str, here: Mapping[str, str], refused: list[str]) -> Found:
    parts = [f"calibration {what}"]
    own = ("measured", "judged", "shipped")
    other = _other_versions(found, here) if found.source in own else []
    if other:
        parts.append(f"measured with other versions: {', '.join(other)}")
    if found.source != "measured" or other:
        parts.append(_how_to_calibrate(found.key))
    parts += [f"refused {reason}" for reason in refused]
    return Found(found, "; ".join(parts), bool(other or refused) or found.source == "conservative")


def _how_to_calibrate(key: CalibrationKey) -> str:
    """Name the command that measures such layers beside such a fallback, if it does."""
    if key.fallback not in (FLASHINFER, FA3):  # of which no time model is known
        return f"{key.fallback} cannot be calibrated"
    if key.fallback not in measured_beside(key.heads, key.kv_bytes):
        return f"{key.heads} with KV of {key.dtype} cannot be calibrated"
    options = "" if key.fallback == FLASHINFER else f"--fallback {key.fallback} "
    options += "--kv-cache-dtype fp8_e4m3 " * (key.kv_bytes == 1)
    return f"`sgl-prefix-attn calibrate {options}--model ...` measures this GPU"


def _other_versions(found: Calibration, here: Mapping[str, str]) -> list[str]:
    there = {name: found.versions.get(name, "unknown") for name in here}
    return [f"{name} {there[name]}, not {here[name]}" for name in here if there[name] != here[name]]


def _preference(path: Path, found: Calibration, here: Mapping[str, str]) -> tuple:
    """Order files: few other versions first, then the latest."""
    measured = found.origin.date.toordinal() if found.origin else 0
    return len(_other_versions(found, here)), -measured, path


def _read(paths: Iterable[Path], refused: list[str]) -> dict[Path, Calibration]:
    found = {}
    for path in paths:
        try:
            found[path] = load(path)
        except CalibrationError as error:
            refused.append(str(error))
    return found


def _measured(folder: Path | None, key, num_sms: int, refused) -> dict[Path, Calibration]:
    """Read the cache files that hold for this key and GPU."""
    files = sorted(folder.glob(f"{_stem(key)}_*.json")) if folder else []
    usable = {}
    for path, found in _read(files, refused).items():
        if (found.key.family, found.key.fallback) != (key.family, key.fallback):
            continue  # that of other kernels, or beside other ones
        why = _mismatch(found, key, num_sms)
        if why is None:
            usable[path] = found
        else:
            refused.append(f"{path}: {why}")
    return usable


def _mismatch(found: Calibration, key, num_sms: int) -> str | None:
    """Say why a cache file is not of any use, or None."""
    if found.key.kernels != key.kernels:
        return f"it is for revision {found.key.kernels} of the kernels, these are {key.kernels}"
    if found.key != key:
        return f"it is for {found.key}"
    if found.num_sms != num_sms:
        return f"it is for {found.num_sms} multiprocessors, this GPU has {num_sms}"
    if not found.samples:
        return "nothing was measured for it"
    return None
