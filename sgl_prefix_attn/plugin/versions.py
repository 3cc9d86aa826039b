"""The supported SGLang releases, and what differs between them: one table."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

# Modules of sgl_prefix_attn.patches that every supported release needs.
_HOOKS = (
    "server_arguments",
    "batch_requests",
    "remaps",
    "graph_capture",
    "graph_key",
    "graph_gate",
)


@dataclass(frozen=True)
class Release:
    """One supported SGLang release.

    hooks    modules of sgl_prefix_attn.patches that `--attention-backend prefix` relies on
    readers  modules of sgl_prefix_attn.paths that read this release's prefix caches
    """

    version: str
    hooks: tuple[str, ...] = _HOOKS
    readers: tuple[str, ...] = ("radix",)


RELEASES = (Release("0.5.17"),)
SUPPORTED = tuple(release.version for release in RELEASES)


def installed() -> Release | None:
    """Return the table's row for the installed SGLang, None where it has none."""
    # A local tag (0.5.17+cu130) is another build of the same code.
    version = metadata.version("sglang").split("+")[0]
    return next((release for release in RELEASES if release.version == version), None)


def problem() -> str | None:
    """Say why the installed SGLang cannot be used, with what to do, or None."""
    if installed() is not None:
        return None
    return (
        f"--attention-backend prefix: SGLang {metadata.version('sglang')} is installed, supported "
        f"is {', '.join(SUPPORTED)}: pip install sglang=={SUPPORTED[-1]}"
    )
