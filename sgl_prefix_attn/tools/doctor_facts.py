"""What `doctor` looks at: this machine and this installation, read in one place."""

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

from sgl_prefix_attn.execute.backends.family import PORTABLE, Family, choose_family
from sgl_prefix_attn.plugin import hooks
from sgl_prefix_attn.plugin import versions as releases
from sgl_prefix_attn.records import HeadConfig
from sgl_prefix_attn.settings import Settings

PACKAGES = ("sgl-prefix-attn", "torch", "triton", "flashinfer-python", "numba", "numpy")
PLUGIN = "prefix_attn"  # our entry point in SGLang's group
_PREFIXES = ("SGLANG_", "SGL_PREFIX_ATTN_", "PREFIX_ATTN_")
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
    """What was found.

    env       the variables of SGLang and the plugin, and CC
    sglang, versions  of SGLang and of PACKAGES; None where one is not installed
    sglang_error  why SGLang cannot be imported, "" if it can
    plugins   what SGLang would load under our entry point's name
    gpu, arch  the first one's name, "" without any, and (major, minor)
    models    which ones the kernels of the device run
    no_hopper  why a server with 32/8 heads cannot run Hopper's kernels on this GPU, None if it can
    failed_self_tests  what failed when these were tried here, and the file that says so
    calibration  what a server with 32/8 heads would find (store.Found), what was raised where
              looking failed, None without a GPU
    """

    python: tuple[int, int]
    env: dict[str, str]
    sglang: str | None
    versions: dict[str, str | None]
    sglang_error: str = ""
    plugins: tuple[EntryPoint, ...] = ()
    hooks: tuple[Hook, ...] = ()
    gpu: str = ""
    arch: tuple[int, int] | None = None
    compiler: str = ""
    models: str = ""
    no_hopper: str | None = None
    failed_self_tests: tuple[tuple[str, str], ...] = ()
    calibration: Any = None


def gather() -> Facts:
    """Read everything. Imports torch, sglang and the patches, so it takes some seconds."""
    # The packages' check names a torch that is missing or broken.
    gpu, arch = _tried(_gpu, lambda error: ("", None))
    no_hopper = _tried(_no_hopper, str) if gpu else "device:cpu"
    env = {k: v for k, v in os.environ.items() if k == "CC" or k.startswith(_PREFIXES)}
    family = _tried(lambda: chosen_family(env, no_hopper).name, lambda error: PORTABLE)
    sglang = _version("sglang")
    # of a version that has no row the newest, to say what differs
    row = releases.match(sglang) if sglang else None
    release = row.release if row else releases.RELEASES[-1]
    # Before the hooks, some of which import what SGLang's own start imports in another order.
    sglang_error = _tried(lambda: importlib.import_module("sglang.srt.server_args") and "", str)
    return Facts(
        python=sys.version_info[:2],
        env=env,
        sglang=sglang,
        versions={name: _version(name) for name in PACKAGES},
        sglang_error=sglang_error,
        plugins=tuple(
            EntryPoint(e.value, e.dist.name if e.dist else "?")
            for e in metadata.entry_points(group="sglang.srt.plugins", name=PLUGIN)
        ),
        hooks=() if sglang_error else tuple(map(_hook, (*release.hooks, *releases.CPU_HOOKS))),
        gpu=gpu,
        arch=arch,
        compiler=_compiler(),
        models=_tried(lambda: _models(gpu), lambda error: "unknown without torch"),
        no_hopper=no_hopper,
        failed_self_tests=_tried(lambda: _failed_self_tests(gpu), lambda error: ()),
        calibration=_tried(lambda: _calibration(family), str) if gpu else None,
    )


def chosen_family(env: Mapping[str, str], no_hopper: str | None) -> Family:
    """Choose as a server with these variables does. Raises ValueError for what stops its start; bad
    values of variables are another check's."""
    try:
        settings = Settings.from_env(env)
    except ValueError:
        settings = Settings()
    return choose_family(settings.kernels, settings.strategy, no_hopper)


def _tried(look: Callable[[], Any], failed: Callable[[str], Any]) -> Any:
    """What is found; what `failed` makes of an error, since any import may be broken."""
    try:
        return look()
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> str:
    """The C compiler that Triton would call, or "": $CC as it is, without it gcc or clang."""
    cc = os.environ.get("CC")
    candidates = ("gcc", "clang") if cc is None else (cc,)
    return next((path for path in map(shutil.which, candidates) if path), "")


def _gpu() -> tuple[str, tuple[int, int] | None]:
    import torch

    if not torch.cuda.is_available():
        return "", None
    return torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)


def _models(gpu: str) -> str:
    import torch

    from sgl_prefix_attn.execute.backends.choice import capabilities_on

    return capabilities_on(torch.device("cuda" if gpu else "cpu")).describe()


def _calibration(family: str) -> Any:
    import torch

    from sgl_prefix_attn.predict.startup import gpu_key, look_up

    device = torch.device("cuda", 0)
    return look_up(gpu_key(family, device, HEADS, torch.bfloat16, 1), device)


def _no_hopper() -> str | None:
    import torch

    from sgl_prefix_attn.execute.backends.choice import why_no_hopper

    return why_no_hopper(torch.device("cuda", 0), HEADS, torch.bfloat16)


def _failed_self_tests(gpu: str) -> tuple[tuple[str, str], ...]:
    from sgl_prefix_attn.execute.self_test_process import failures
    from sgl_prefix_attn.predict import store

    folder = store.verdict_folder()
    found = failures(folder, gpu, store.versions()) if folder else []
    return tuple((f"{said.subject}: {said.why_not}", str(path)) for path, said in found)


def _hook(module: str) -> Hook:
    """Compare sgl_prefix_attn.patches.<module> with the SGLang installed."""

    def compared() -> Hook:
        patch = hooks.load(module)
        return Hook(module, patch.TARGET, patch.WHY, hooks.difference(module))

    return _tried(compared, lambda error: Hook(module, "", "", error))
