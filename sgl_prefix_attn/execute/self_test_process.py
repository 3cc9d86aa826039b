"""The self-test of Hopper's kernels in a process of its own, and verdicts, which files remember.

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
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import orjson

from sgl_prefix_attn.kernels import words
from sgl_prefix_attn.records import HeadConfig

logger = logging.getLogger(__name__)

NOT_TRIED = 75  # exit status of the process where the device has no room for it
# Importing torch and compiling take most of it, on a busy host several times as long.
DEADLINE_S = 180.0
_COMMAND = [sys.executable, "-m", "sgl_prefix_attn.execute.self_test"]


@dataclass(frozen=True)
class Subject:
    """What is tried: Hopper's kernels on heads of one shape, on one kind of GPU.

    versions     of the packages that compile and launch the kernels
    sinks        the dtype of the layers' sinks, "" without sinks
    kv_dtype     of the KV cache, "" like the model
    part_tokens  of aligned plans, which have kernels of their own; 0: plans are not aligned
    kernels      code_digest() of the kernels and of what runs them
    """

    gpu: str
    heads: HeadConfig
    dtype: str
    soft_cap: float
    versions: Mapping[str, str]
    sinks: str = ""
    kv_dtype: str = ""
    part_tokens: int = 0
    kernels: str = field(default_factory=lambda: code_digest())

    def __str__(self) -> str:
        return f"{self.heads}, {self.dtypes}" + ", aligned plans" * bool(self.part_tokens)

    @property
    def dtypes(self) -> str:
        """The model's dtype and, where it is another, the KV cache's."""
        alike = self.kv_dtype in ("", self.dtype)
        return self.dtype if alike else f"{self.dtype}-{self.kv_dtype}"


@dataclass(frozen=True)
class Verdict:
    """why_not: what went wrong, None where the kernels passed.

    lasts: it says something about the kernels; False where they could not be tried just now.
    """

    subject: Subject
    why_not: str | None
    lasts: bool = True


def code_digest() -> str:
    """Digest the sources of Hopper's kernels and of what plans, launches and tries them: with
    others they may pass or hang where these did not. Sources: not every Triton can import them."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in (Path(words.__file__).parent, package / "execute", package / "plan"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def path_of(folder: Path, subject: Subject) -> Path:
    """Name the file of a subject's verdict: a newer one, of other versions, takes its place."""
    kinds = "_cap" * bool(subject.soft_cap) + f"_sinks-{subject.sinks}" * bool(subject.sinks)
    kinds += f"_parts-{subject.part_tokens}" * bool(subject.part_tokens)
    shape = f"{subject.heads.shape}_{subject.dtypes}{kinds}"
    return folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', subject.gpu)}_{shape}.json"


def remembered(folder: Path, subject: Subject) -> Verdict | None:
    """Return the verdict on exactly this subject, None without one."""
    verdict = _read(path_of(folder, subject))
    return verdict if verdict is not None and verdict.subject == subject else None


def failures(folder: Path, gpu: str, versions: Mapping[str, str]) -> list[tuple[Path, Verdict]]:
    """List what failed on this kind of GPU with these versions and kernels, and where it stands."""
    here = (gpu, dict(versions), code_digest())
    return [
        (path, verdict)
        for path in sorted(folder.glob("*.json"))
        if (verdict := _read(path)) is not None and verdict.why_not is not None
        for subject in [verdict.subject]
        if (subject.gpu, subject.versions, subject.kernels) == here
    ]


def _read(path: Path) -> Verdict | None:
    """A file that is no verdict is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Verdict)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        logger.warning("%s cannot be read (%s): the kernels are tried again", path, error)
        return None


def remember(folder: Path, verdict: Verdict) -> None:
    """Write a verdict that lasts, at once for other processes; without a place, only say so."""
    if not verdict.lasts:
        return
    path = path_of(folder, verdict.subject)
    part = path.with_suffix(f".{os.getpid()}.part")
    fields = {"subject": asdict(verdict.subject), "why_not": verdict.why_not}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(orjson.dumps(fields, option=orjson.OPT_INDENT_2) + b"\n")
        part.replace(path)
    except OSError as error:
        logger.warning(
            "the verdict of the kernels' self-test is not kept, every start tries them: %s", error
        )


def run_self_test(subject: Subject, device: str) -> Verdict:
    """Try the subject's kernels on a device in a process that ends by DEADLINE_S at the latest."""
    command = [*_COMMAND, orjson.dumps(asdict(subject)).decode(), device]
    with ExitStack() as opened:
        try:
            # a file, not a pipe: what the process leaves behind may keep that open
            log = opened.enter_context(tempfile.TemporaryFile())
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
