"""Where a result came from: machine, versions, commit and command, in every result file."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import orjson

from sgl_prefix_attn import __version__

ROOT = Path(__file__).resolve().parent.parent
# Names of the commit where the tree was copied without its .git: "HASH" or "HASH-dirty".
COMMIT_ENV = "BENCH_COMMIT"
PACKAGES = ("torch", "triton", "flashinfer-python", "sglang", "sglang-kernel", "sgl-prefix-attn")
_SOURCE_SUFFIXES = (".py", ".cu", ".cuh", ".h", ".hpp", ".cpp")
# Folders of what is no project's own source, hidden ones among them.
_FOREIGN = re.compile(r"(?:^|/)(?:third_party|cutlass|build|dist|\.[^/]*)/")


def collect(module: str, argv: list[str], **extra) -> dict:
    """Make the "meta" of a result file; `module` and `argv` are the command that makes it."""
    commit, dirty = _own_commit()
    gpu, driver = _gpu()
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "gpu": gpu,
        "driver": driver,
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
        "commit": commit,
        "dirty": dirty,
        "command": shlex.join(["python", "-m", module, *argv]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **extra,
    }


def save(path: str | Path | None, meta: dict, rows: list[dict], **parts) -> None:
    """Write a result file at once: a reader sees the old one or the new one. None: nowhere."""
    if path is None:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_bytes(
        orjson.dumps({"meta": meta, "rows": rows, **parts}, option=orjson.OPT_INDENT_2) + b"\n"
    )
    part.replace(path)


def load(path: str | Path) -> dict:
    """Load a result file. Raises ValueError naming the file when it is none."""
    try:
        result = orjson.loads(Path(path).read_bytes())
        result["meta"]["command"], result["rows"][0]
    except (OSError, orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is not a result file: {error!r}") from None
    return result


def _version(package: str) -> str | None:
    if package == "sgl-prefix-attn":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def sources(folder: str | Path) -> dict:
    """Identify the code in a folder: {"commit", "dirty", "sha256", "num_files"}.

    commit  of the git checkout that the folder is (part of), None where git tracks nothing in it;
            dirty: whether tracked files differ from the commit, or sources are untracked
    sha256  over the relative paths, sorted, and contents of its Python, C++ and CUDA sources;
            folders named build, dist, third_party or cutlass and hidden ones are left out
    """
    folder = Path(folder).resolve()
    commit, dirty = _commit(folder)
    found = (path for path in folder.rglob("*") if path.suffix in _SOURCE_SUFFIXES)
    files = sorted(p.relative_to(folder).as_posix() for p in found if p.is_file())
    own = [name for name in files if not _FOREIGN.search(name)]
    digest = hashlib.sha256()
    for name in own:
        content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return {"commit": commit, "dirty": dirty, "sha256": digest.hexdigest(), "num_files": len(own)}


def _output(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


def _commit(folder: Path) -> tuple[str | None, bool | None]:
    """Return (None, None) for a folder in which git tracks nothing, even inside a checkout."""
    try:
        git = ("git", "-C", str(folder))
        if not _output(*git, "ls-files"):
            return None, None
        changed = _output(*git, "status", "--porcelain", "-uno", "--", ".")
        new = (*git, "ls-files", "--others", "--exclude-standard", "--")
        added = _output(*new, *(f"*{suffix}" for suffix in _SOURCE_SUFFIXES))
        return _output(*git, "rev-parse", "HEAD"), bool(changed or added)
    except (OSError, subprocess.SubprocessError):
        return None, None


def _own_commit() -> tuple[str, bool | None]:
    stated = os.environ.get(COMMIT_ENV, "")
    if stated:
        return stated.removesuffix("-dirty"), stated.endswith("-dirty")
    commit, dirty = _commit(ROOT)
    return commit or "unknown", dirty


def _gpu() -> tuple[str | None, str | None]:
    """Return name and driver of the first GPU, (None, None) without one."""
    try:
        line = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    except (OSError, subprocess.SubprocessError):
        return None, None
    name, _, driver = line.partition("\n")[0].partition(",")
    return (name.strip(), driver.strip()) if name else (None, None)
