"""The supported SGLang releases, and what differs between them: one table."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Release:
    """One supported SGLang release.

    hooks      modules of sgl_prefix_attn.patches that `--attention-backend prefix` relies on
    cpu_hooks  those that our CPU platform needs besides
    readers    modules of sgl_prefix_attn.paths that read this release's prefix caches
    """

    version: str
    hooks: tuple[str, ...] = (
        "server_arguments",
        "batch_requests",
        "remaps",
        "graph_capture",
        "graph_key",
        "graph_gate",
    )
    cpu_hooks: tuple[str, ...] = ("cpu_no_triton", "cpu_last_loc")
    readers: tuple[str, ...] = ("radix_reader", "chunk_reader")


RELEASES = (Release("0.5.17"),)
SUPPORTED = ", ".join(release.version for release in RELEASES)
INSTALL = f"pip install sglang=={RELEASES[-1].version}"


def release_of(version: str | None) -> Release | None:
    """Return the table's row for a version of SGLang, None where it has none."""
    # A local tag (0.5.17+cu130) is another build of the same code.
    public = (version or "").split("+")[0]
    return next((release for release in RELEASES if release.version == public), None)


def installed() -> Release:
    """Return the installed SGLang's row. Raises RuntimeError, with what to do, if it has none."""
    version = metadata.version("sglang")
    release = release_of(version)
    if release is None:
        raise RuntimeError(
            f"--attention-backend prefix: SGLang {version} is installed, supported is {SUPPORTED}: "
            f"{INSTALL}"
        )
    return release
