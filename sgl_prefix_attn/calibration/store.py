"""Where calibrations lie: one JSON file each, in a cache folder of the user and shipped ones."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import orjson

from sgl_prefix_attn.calibration.codec import CalibrationError, decode, encode
from sgl_prefix_attn.calibration.record import Calibration, CalibrationKey

SHIPPED = Path(__file__).with_name("shipped")
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


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """$XDG_CACHE_HOME or ~/.cache, then sgl_prefix_attn/calibration."""
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
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
    return hashlib.sha256(orjson.dumps(content)).hexdigest()[:8]


def save(calibration: Calibration, path: Path) -> None:
    """Write the file as a whole or not at all. CalibrationError: it does not add up."""
    data = encode(calibration)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: Path, key: CalibrationKey | None = None) -> Calibration:
    """Raises CalibrationError that names the file and why it is refused: unreadable, truncated,
    of another format, inconsistent, or for another key than `key`."""
    try:
        calibration = decode(path.read_bytes())
    except (OSError, CalibrationError) as error:
        raise CalibrationError(f"{path}: {error}") from None
    if key is not None and calibration.key != key:
        raise CalibrationError(f"{path}: it is for {calibration.key}")
    return calibration
