"""Hands the hooks in patches/ to SGLang. Each is a file of its own:

    TARGET  dotted name of what it hooks        TYPE  before, after, around or replace
    WHY     the reason, for doctor              hook  the function (SGLang's HookType has its form)
    PARAMETERS  the first parameters of TARGET, on which the hook relies

SGLang applies hooks after register() has returned and only logs one that fails, so the backend is
built only after verify_applied().
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import ModuleType

from sgl_prefix_attn import patches
from sgl_prefix_attn.plugin.versions import CPU_HOOKS, INSTALL, SUPPORTED, Installed, Release


def load(name: str) -> ModuleType:
    """Import the hook sgl_prefix_attn.patches.<name>."""
    return importlib.import_module(f"{patches.__name__}.{name}")


def register_all(release: Release) -> None:
    """Hand every hook of a release to SGLang's HookRegistry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sgl_prefix_attn.engine.cpu import platform

    cpu_hooks = CPU_HOOKS if platform.is_active() else ()
    for patch in map(load, (*release.hooks, *cpu_hooks)):
        HookRegistry.register(patch.TARGET, patch.hook, HookType(patch.TYPE))


def difference(name: str) -> str:
    """Say what sgl_prefix_attn.patches.<name> relies on and SGLang lacks; "" if nothing."""
    patch = load(name)
    try:
        function = _plain(_resolve(patch.TARGET))
    except Exception as error:  # importing SGLang's modules may fail in any way
        return f"{patch.TARGET}: {type(error).__name__}: {error}"
    parameters = tuple(inspect.signature(function).parameters)
    if parameters[: len(patch.PARAMETERS)] != patch.PARAMETERS:
        return (
            f"{patch.TARGET}({', '.join(parameters)}) begins otherwise than "
            f"({', '.join(patch.PARAMETERS)})"
        )
    return ""


def verify_applied(sglang: Installed) -> None:
    """Raise RuntimeError, with what to do, when a needed hook does not fit or is not in place."""
    differences = list(filter(None, map(difference, sglang.release.hooks)))
    if differences:
        raise RuntimeError(
            f"--attention-backend prefix: SGLang {sglang.version} differs from what is supported "
            f"({SUPPORTED}): {'; '.join(differences)}. {INSTALL}"
        )
    absent = [patch.TARGET for patch in map(load, sglang.release.hooks) if not _is_applied(patch)]
    if absent:
        raise RuntimeError(
            f"--attention-backend prefix: SGLang did not apply the hook on {', '.join(absent)}. "
            f"Supported is SGLang {SUPPORTED}; install it ({INSTALL}), and check that "
            "SGLANG_PLUGINS, if set, names prefix_attn. `sgl-prefix-attn doctor` tells more."
        )


def _is_applied(patch: ModuleType) -> bool:
    # HookRegistry wraps functions in functions: ours is in a closure of the chain of __wrapped__.
    function: Callable | None = _plain(_resolve(patch.TARGET))
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is patch.hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _resolve(target: str) -> Callable:
    """Return what a dotted name stands for. Where a module of it fails to import another one, that
    error is raised; pkgutil alone would say that the name does not exist."""
    names = target.split(".")
    for n in range(len(names) - 1, 0, -1):
        module = ".".join(names[:n])
        try:
            return pkgutil.resolve_name(f"{module}:{'.'.join(names[n:])}")
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise
    raise ModuleNotFoundError(f"No module named {names[0]!r}", name=names[0])


def _plain(function: Callable) -> Callable:
    return getattr(function, "__func__", function)
