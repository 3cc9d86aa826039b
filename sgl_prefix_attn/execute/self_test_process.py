"""The self-test of row tiles in a process of its own, and its verdicts, which files remember.

Kernels that hang keep their process and its GPU context, whatever waits for them: so a server never
runs kernels that no other process has run before. What that process compiled is in Triton's cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from sgl_prefix_attn.kernels.gluon import words
from sgl_prefix_attn.records import HeadConfig

logger = logging.getLogger(__name__)

NOT_TRIED = 75  # exit status of the process where the device has no room for it
# Importing torch and compiling take most of it, on a busy host several times as long.
DEADLINE_S = 180.0
_COMMAND = [sys.executable, "-m", "sgl_prefix_attn.execute.self_test"]
# What a verdict is about besides kernels/gluon: launches, the words that the kernels read, the test
# itself. By path: not every Triton can import them.
_AROUND_KERNELS = (
    "execute/backends/gluon_backend.py",
    "execute/self_test.py",
    "plan/row_tile_order.py",
    "plan/row_tile_words.py",
)


@dataclass(frozen=True)
class Subject:
    """What is tried: row tiles of one shape on one kind of GPU.

    versions  of the packages that compile and launch the kernels
    kernels   code_digest() of the kernels and of what runs them
    """

    gpu: str
    heads: HeadConfig
    dtype: str
    soft_cap: float
    versions: Mapping[str, str]
    kernels: str

    @classmethod
    def of(
        cls, gpu: str, heads: HeadConfig, dtype: str, soft_cap: float, versions: Mapping[str, str]
    ) -> Subject:
        return cls(gpu, heads, dtype, soft_cap, dict(versions), code_digest())

    def __str__(self) -> str:
        heads = f"{self.heads.num_qo_heads}/{self.heads.num_kv_heads} heads"
        return f"{heads} of {self.heads.head_dim}, {self.dtype}"


@dataclass(frozen=True)
class Verdict:
    """why_not: what went wrong, None where the kernels passed.

    lasts: it says something about the kernels; False where they could not be tried just now.
    """

    subject: Subject
    why_not: str | None
    lasts: bool = True

    def encode(self) -> bytes:
        fields = {"subject": asdict(self.subject), "why_not": self.why_not}
        return orjson.dumps(fields, option=orjson.OPT_INDENT_2) + b"\n"

    @classmethod
    def decode(cls, text: bytes) -> Verdict:
        """Raises ValueError for anything that encode() does not write."""
        try:
            fields = orjson.loads(text)
            subject = fields["subject"]
            subject["heads"] = HeadConfig(**subject["heads"])
            verdict = cls(Subject(**subject), fields["why_not"])
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"no verdict: {error!r}") from error
        if not isinstance(verdict.why_not, str | None):
            raise ValueError(f"no verdict: why_not is {verdict.why_not!r}")
        return verdict


def code_digest() -> str:
    """Digest of the sources of the row-tile kernels and of what plans, launches and tries them:
    with others they may pass or hang where these did not."""
    package = Path(__file__).parents[1]
    kernels = sorted(Path(words.__file__).parent.glob("*.py"))
    digest = hashlib.sha256()
    for path in (*kernels, *(package / name for name in _AROUND_KERNELS)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def path_of(folder: Path, subject: Subject) -> Path:
    """The file of a subject's verdict: what is newer, of other versions, takes its place."""
    heads = subject.heads
    cap = "_cap" if subject.soft_cap else ""
    shape = f"{heads.num_qo_heads}-{heads.num_kv_heads}-{heads.head_dim}_{subject.dtype}{cap}"
    return folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', subject.gpu)}_{shape}.json"


def remembered(folder: Path, subject: Subject) -> Verdict | None:
    """The verdict on exactly this subject, None without one; a file that is no verdict is none."""
    path = path_of(folder, subject)
    try:
        verdict = Verdict.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is not used: %s", path, error)
        return None
    return verdict if verdict.subject == subject else None


def remember(folder: Path, verdict: Verdict) -> None:
    """Write a verdict that lasts, at once for other processes; without a place, only say so."""
    if not verdict.lasts:
        return
    path = path_of(folder, verdict.subject)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(verdict.encode())
        part.replace(path)
    except OSError as error:
        logger.warning("the verdict of the kernels' self-test is not kept: %s", error)


def failures(folder: Path, gpu: str, versions: Mapping[str, str]) -> list[tuple[Path, Verdict]]:
    """What failed on this kind of GPU with these versions and kernels, and where that stands."""
    found = []
    here = (gpu, dict(versions), code_digest())
    for path in sorted(folder.glob("*.json")):
        try:
            verdict = Verdict.decode(path.read_bytes())
        except (OSError, ValueError):
            continue
        subject = verdict.subject
        tried = (subject.gpu, subject.versions, subject.kernels)
        if verdict.why_not is not None and tried == here:
            found.append((path, verdict))
    return found


def run_self_test(subject: Subject, device: str) -> Verdict:
    """Try the subject's kernels on a device in a process that ends by DEADLINE_S at the latest."""
    command = [*_COMMAND, orjson.dumps(asdict(subject)).decode(), device]
    # a file, not a pipe: what the process leaves behind may keep that open
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            return Verdict(subject, f"not started: {error}", lasts=False)
        try:
            status = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            return Verdict(subject, f"no end within {DEADLINE_S:.0f} s")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if status == 0:
            return Verdict(subject, None)
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "nothing said"
    why_not = f"exit status {status}: {last[:300]}"
    return Verdict(subject, why_not, lasts=status != NOT_TRIED)
