"""Where calibrations lie: one JSON file each, in a cache folder of the user and shipped ones.

Files are compared by what is in them; a file's name only tells where to look.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import msgspec

from sgl_prefix_attn.predict.codec import CalibrationError, decode
from sgl_prefix_attn.predict.derived import conservative, distance, scaled
from sgl_prefix_attn.predict.record import Calibration, CalibrationKey

SHIPPED = Path(__file__).with_name("shipped")
HOW_TO_CALIBRATE = "`sgl-prefix-attn calibrate --model ...` measures this GPU"
# Packages whose kernels or plans are measured.
_PACKAGES = ("sgl-prefix-attn", "torch", "triton", "flashinfer-python", "sglang")


def versions() -> dict[str, str]:
    """Version of every package that a calibration depends on; "absent" without one."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """$XDG_CACHE_HOME or ~/.cache, then sgl_prefix_attn/calibration; None for a user without a
    home folder."""
    base = environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # neither HOME nor an entry in the user database
            return None
    return Path(base) / "sgl_prefix_attn" / "calibration"


def file_name(key: CalibrationKey, package_versions: Mapping[str, str]) -> str:
    """Readable; its last part is a digest of all that it stands for."""
    heads = key.heads
    parts = (
        re.sub(r"[^A-Za-z0-9.]+", "-", key.gpu).strip("-"),
        f"{heads.num_qo_heads}-{heads.num_kv_heads}-{heads.head_dim}",
        key.dtype,
        f"page{key.page_size}",
        _digest(key, package_versions),
    )
    return "_".join(parts) + ".json"


def _digest(key: CalibrationKey, package_versions: Mapping[str, str]) -> str:
    content = (repr(key), sorted(package_versions.items()))
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:8]


def load(path: Path, key: CalibrationKey | None = None) -> Calibration:
    """Raises CalibrationError that names the file and why it is refused: unreadable, truncated,
    of another format, inconsistent, or for another key than `key`."""
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
    """message: one line for the log, what is used and, unless measured, how to calibrate."""

    calibration: Calibration
    message: str


def find(
    key: CalibrationKey,
    num_sms: int,
    package_versions: Mapping[str, str] | None = None,
    folders: Folders | None = None,
) -> Found:
    """The best calibration that there is for `key`, by source:

    measured      the cache file of key and versions
    shipped       of this GPU, heads and dtype; versions and page size may differ
    scaled        shipped for other heads of this GPU: its rates and coefficients, which are
                  multipliers of the cost model or microseconds, without the corrections
    conservative  rates by the GPU's name, coefficients of a shipped H100 or the time model's own

    Files that are refused are named in the message, and the search goes on.
    """
    package_versions = versions() if package_versions is None else dict(package_versions)
    folders = folders or Folders.default()
    refused: list[str] = []
    if folders.cache is not None:
        path = folders.cache / file_name(key, package_versions)
        measured = _measured(path, key, num_sms, package_versions, refused)
        if measured is not None:
            what = f"measured on this machine ({path}, {measured.origin})"
            return Found(measured, _line(what, refused))
    shipped = {
        path: calibration
        for path in sorted(folders.shipped.glob("*.json"))
        if (calibration := _read(path, refused)) is not None
    }
    calibration, what = (
        _shipped(key, num_sms, package_versions, shipped)
        or _scaled(key, num_sms, shipped)
        or _conservative(key, num_sms, shipped)
    )
    return Found(calibration, _line(f"{calibration.source}: {what}; {HOW_TO_CALIBRATE}", refused))


def _line(what: str, refused: list[str]) -> str:
    return "; ".join([f"calibration {what}", *(f"refused {reason}" for reason in refused)])


def _read(path: Path, refused: list[str]) -> Calibration | None:
    try:
        return load(path)
    except CalibrationError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            refused.append(str(error))
        return None


def _measured(path: Path, key, num_sms, package_versions, refused) -> Calibration | None:
    found = _read(path, refused)
    if found is None:
        return None
    why = _mismatch(found, key, num_sms, package_versions)
    if why is not None:
        refused.append(f"{path}: {why}")
        return None
    return replace(found, source="measured")


def _mismatch(found: Calibration, key, num_sms: int, package_versions) -> str | None:
    """Why a cache file is not the one its name says, or None."""
    if found.key != key:
        return f"it is for {found.key}"
    if found.num_sms != num_sms:
        return f"it is for {found.num_sms} multiprocessors, this GPU has {num_sms}"
    if found.versions != package_versions:
        return f"it is for {found.versions}"
    return None


def _shipped(key, num_sms, package_versions, shipped) -> tuple[Calibration, str] | None:
    same = {
        path: found
        for path, found in shipped.items()
        if replace(found.key, page_size=key.page_size) == key and found.num_sms == num_sms
    }
    if not same:
        return None
    path = min(same, key=lambda path: (distance(same[path].key, key), path))
    found = same[path]
    what = f"{path.name} ({found.origin})"
    if found.key.page_size != key.page_size:
        what += f", for pages of {found.key.page_size}"
    other = sorted(
        name for name in package_versions if found.versions.get(name) != package_versions[name]
    )
    if other:
        what += f", with other versions of {', '.join(other)}"
    return replace(found, key=key, source="shipped"), what


def _scaled(key, num_sms, shipped) -> tuple[Calibration, str] | None:
    same_gpu = {
        path: found
        for path, found in shipped.items()
        if found.key.gpu == key.gpu and found.num_sms == num_sms
    }
    if not same_gpu:
        return None
    path = min(same_gpu, key=lambda path: (distance(same_gpu[path].key, key), path))
    found = same_gpu[path]
    heads = found.key.heads
    what = (
        f"{path.name} ({found.origin}), for {heads.num_qo_heads}/{heads.num_kv_heads} heads of "
        f"{heads.head_dim}"
    )
    return scaled(found, key), what


def _conservative(key, num_sms, shipped) -> tuple[Calibration, str]:
    of_h100 = [found for found in shipped.values() if "H100" in found.key.gpu]
    like = min(of_h100, key=lambda found: distance(found.key, key), default=None)
    return conservative(key, num_sms, like), f"nothing is measured on {key.gpu}"
