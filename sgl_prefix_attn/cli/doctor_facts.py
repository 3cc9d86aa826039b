"""What `doctor` looks at: this machine and this installation, read in one place."""

import importlib
import os
import shutil
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sgl_prefix_attn.plugin import hooks
from sgl_prefix_attn.plugin import versions as releases
from sgl_prefix_attn.records import HeadConfig

PACKAGES = ("sgl-prefix-attn", "sglang", "torch", "triton", "flashinfer-python", "numba", "numpy")
PLUGIN = "prefix_attn"  # our entry point in SGLang's group
_PREFIXES = ("SGLANG_", "SGL_PREFIX_ATTN_")
HEADS = HeadConfig(32, 8, 128)  # of the bfloat16 model whose kernels and calibration are looked up


class EntryPoint(NamedTuple):
    value: str
    dist: str


class Hook(NamedTuple):
    """One patched place in SGLang; `error` says what it lacks, empty if it fits."""

    module: str
    target: str
    why: str
    error: str


@dataclass(frozen=True)
class Facts:
    """`versions` holds None for what is not installed; `arch` is the first GPU's (major, minor).

    `unmet`: of `versions` those that the installed SGLang does not accept, with what it requires.
    `env` has the variables of SGLang and the plugin, and CC.
    `trees`: what reads the installed SGLang's prefix caches, a sentence each.
    `plugins`: what SGLang would load under our entry point's name.
    `models`: which ones the kernels of the device run.
    `no_row_tiles`: why a server with 32/8 heads cannot run row tiles on this GPU, None if it can.
    `failed_self_tests`: what failed when row tiles were tried here, and the file that says so.
    `calibration`: what a server with 32/8 heads would find, its source, and whether the server
    would log it as a warning; "" without a GPU.
    """

    python: tuple[int, int]
    env: dict[str, str]
    versions: dict[str, str | None]
    unmet: dict[str, str] = field(default_factory=dict)
    plugins: tuple[EntryPoint, ...] = ()
    hooks: tuple[Hook, ...] = ()
    trees: tuple[str, ...] = ()
    gpu: str = ""
    arch: tuple[int, int] | None = None
    compiler: str = ""
    models: str = ""
    no_row_tiles: str | None = None
    failed_self_tests: tuple[tuple[str, str], ...] = ()
    calibration: str = ""
    calibration_source: str = ""
    calibration_warning: bool = False


def gather() -> Facts:
    """Read everything. Imports torch, sglang and the patches, so it takes some seconds."""
    gpu, arch = _gpu()
    calibration, source, warning = _calibration() if gpu else ("", "", False)
    versions = {name: _version(name) for name in PACKAGES}
    release = _release(versions["sglang"])
    return Facts(
        python=sys.version_info[:2],
        env={k: v for k, v in os.environ.items() if k == "CC" or k.startswith(_PREFIXES)},
        versions=versions,
        unmet=_unmet(versions),
        plugins=tuple(
            EntryPoint(e.value, e.dist.name if e.dist else "?")
            for e in metadata.entry_points(group="sglang.srt.plugins", name=PLUGIN)
        ),
        hooks=tuple(map(_hook, (*release.hooks, *release.cpu_hooks))),
        trees=tuple(map(_first_line, release.readers)),
        gpu=gpu,
        arch=arch,
        compiler=_compiler(),
        models=_models(gpu),
        no_row_tiles=_no_row_tiles() if gpu else "device:cpu",
        failed_self_tests=_failed_self_tests(gpu) if gpu else (),
        calibration=calibration,
        calibration_source=source,
        calibration_warning=warning,
    )


def _release(version: str | None) -> releases.Release:
    """The row of the installed SGLang; of one that has none the newest, to say what differs."""
    found = releases.match(version) if version else None
    return found.release if found else releases.RELEASES[-1]


def _first_line(reader: str) -> str:
    return str(importlib.import_module(f"sgl_prefix_attn.paths.{reader}").__doc__).splitlines()[0]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _unmet(versions: dict[str, str | None]) -> dict[str, str]:
    """SGLang's requirements of packages in `versions` that these do not meet."""
    if versions["sglang"] is None:
        return {}
    unmet: dict[str, str] = {}
    for requirement in map(Requirement, metadata.requires("sglang") or ()):
        name = canonicalize_name(requirement.name)
        version = versions.get(name)
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if version and needed and not requirement.specifier.contains(version, prereleases=True):
            unmet[name] = str(requirement.specifier)
    return unmet


def _compiler() -> str:
    """The C compiler that Triton would call, or "": $CC as it is, without it gcc or clang."""
    cc = os.environ.get("CC")
    candidates = ("gcc", "clang") if cc is None else (cc,)
    return next((path for path in map(shutil.which, candidates) if path), "")


def _gpu() -> tuple[str, tuple[int, int] | None]:
    try:
        import torch
    except Exception:  # the versions check names a torch that is missing or broken
        return "", None
    if not torch.cuda.is_available():
        return "", None
    return torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)


def _models(gpu: str) -> str:
    try:
        import torch

        from sgl_prefix_attn.execute.backends.choice import backend_class
    except Exception:  # as above
        return "unknown without torch"
    return backend_class(torch.device("cuda" if gpu else "cpu")).capabilities.describe()


def _calibration() -> tuple[str, str, bool]:
    """Message, source and whether it is a warning; source "" says that looking failed."""
    try:
        import torch

        from sgl_prefix_attn.predict import startup, store

        key = startup.gpu_key(torch.device("cuda", 0), HEADS, torch.bfloat16, 1)
        found = store.find(key, torch.cuda.get_device_properties(0).multi_processor_count)
    except Exception as error:
        return _text(error), "", True
    return found.message, found.calibration.source, found.warning


def _no_row_tiles() -> str | None:
    """A label; what was raised where looking failed."""
    try:
        import torch

        from sgl_prefix_attn.execute.backends.choice import why_no_row_tiles

        return why_no_row_tiles(torch.device("cuda", 0), HEADS, torch.bfloat16)
    except Exception as error:
        return _text(error)


def _failed_self_tests(gpu: str) -> tuple[tuple[str, str], ...]:
    try:
        from sgl_prefix_attn.execute.self_test_process import failures
        from sgl_prefix_attn.predict import store
    except Exception:  # as above
        return ()
    folder = store.verdict_folder()
    found = failures(folder, gpu, store.versions()) if folder else []
    return tuple((f"{said.subject}: {said.why_not}", str(path)) for path, said in found)


def _hook(module: str) -> Hook:
    """Compare sgl_prefix_attn.patches.<module> with the SGLang installed."""
    try:
        patch = hooks.load(module)
    except Exception as error:  # what it imports may be broken
        return Hook(module, "", "", _text(error))
    return Hook(module, patch.TARGET, patch.WHY, hooks.difference(module))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
