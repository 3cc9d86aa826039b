"""The SGLang releases that were tried, and what differs between them: one table."""

import sys
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

_EVERYWHERE = (
    "server_arguments",
    "batch_requests",
    "graph_capture",
    "graph_key",
    "graph_gate",
    "draft_backend",
    "draft_names",
    "draft_capture",
    "draft_graph_key",
    "draft_graph_gate",
    "round_lengths",
    "built_backends",
)
# What our CPU platform needs besides, on each of them.
CPU_HOOKS = ("cpu_no_triton", "cpu_last_loc", "cpu_forked_processes", "cpu_absorbed_prefill")


@dataclass(frozen=True)
class Release:
    """One SGLang release.

    hooks   modules of sgl_prefix_attn.patches that `--attention-backend prefix` relies on
    python  the oldest Python that it runs on
    """

    version: str
    hooks: tuple[str, ...]
    python: tuple[int, int] = (3, 10)


_TWO_TREES = (
    *_EVERYWHERE,
    "keep_prefill_post_init",
    "model_arguments_method",
    "remaps",
    "unified_remaps",
)
_BY_NODE = (*_EVERYWHERE, "keep_prefill", "model_arguments", "unified_remaps")
_BY_PATH = (*_EVERYWHERE, "keep_prefill", "model_arguments", "checkpoint_remaps")

RELEASES = (
    Release("0.5.17", _TWO_TREES),
    Release("0.5.18", _TWO_TREES),
    Release("0.5.19", _BY_NODE),
    Release("0.5.20", _BY_NODE),
    Release("0.5.21", _BY_NODE),
    Release("0.5.22", _BY_PATH, python=(3, 11)),
    Release("0.5.23", _BY_PATH, python=(3, 11)),
)
SUPPORTED = f"{RELEASES[0].version} to {RELEASES[-1].version}"


def newest_for(python: tuple[int, int]) -> str:
    """Return the newest release that a Python runs, the oldest where it runs none."""
    return [r.version for i, r in enumerate(RELEASES) if i == 0 or r.python <= python][-1]


def install_command(python: tuple[int, int]) -> str:
    return f"pip install sglang=={newest_for(python)}"


INSTALL = install_command(sys.version_info[:2])


class Installed(NamedTuple):
    """release: whose hooks are used. tried: whether this very version is in the table;
    another one is served where all that the hooks rely on is there."""

    version: str
    release: Release
    tried: bool


def match(version: str) -> Installed | None:
    """Return the table's row for a version of SGLang: its own, else that of the newest release
    before it; None for one that is older than all."""
    try:
        # A local tag (0.5.17+cu130) is another build of the same code.
        public = Version(Version(version).public)
    except InvalidVersion:
        return None
    earlier = [release for release in RELEASES if Version(release.version) <= public]
    if not earlier:
        return None
    return Installed(version, earlier[-1], Version(earlier[-1].version) == public)


def installed() -> Installed:
    """Return the installed SGLang and its row. Raises RuntimeError, with what to do, if it has
    none."""
    version = metadata.version("sglang")
    found = match(version)
    if found is None:
        raise RuntimeError(
            f"--attention-backend prefix: SGLang {version} is installed, supported is {SUPPORTED}: "
            f"{INSTALL}"
        )
    return found
