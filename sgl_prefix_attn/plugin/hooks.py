"""Hands the hooks in patches/ to SGLang, one per file: TARGET, WHY and the function.

SGLang applies hooks after register() has returned and only logs one that fails, so the backend is
built only after verify_applied().
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from sgl_prefix_attn import patches
from sgl_prefix_attn.cpu import platform
from sgl_prefix_attn.plugin.versions import SUPPORTED, Release

_registered = False


def load(name: str) -> ModuleType:
    """Import the hook sgl_prefix_attn.patches.<name>."""
    return importlib.import_module(f"{patches.__name__}.{name}")


def register_all(release: Release) -> None:
    """Hand every hook of a release to SGLang's HookRegistry, once per process."""
    global _registered
    if _registered:
        return
    _registered = True
    cpu_hooks = ("cpu_index_helpers",) if platform.is_active() else ()
    for name in (*release.hooks, *cpu_hooks):
        load(name).register()


def missing(release: Release) -> list[str]:
    """Targets of a release's hooks whose attribute in this process our hook does not wrap."""
    needed = map(load, release.hooks)
    return [hook.TARGET for hook in needed if not _is_applied(hook)]


def verify_applied(release: Release) -> None:
    """Raise RuntimeError, with what to do, when a needed hook is not in place."""
    absent = missing(release)
    if not absent:
        return
    raise RuntimeError(
        f"--attention-backend prefix: SGLang did not apply the hook on {', '.join(absent)}. "
        f"Supported is SGLang {', '.join(SUPPORTED)}; install it (pip install "
        f"sglang=={SUPPORTED[-1]}), and check that SGLANG_PLUGINS, if set, names prefix_attn. "
        f"`sgl-prefix-attn doctor` tells more."
    )


def _is_applied(hook: ModuleType) -> bool:
    try:
        function = pkgutil.resolve_name(hook.TARGET)
    except (ImportError, AttributeError):
        return False
    # HookRegistry wraps functions in functions: ours is in a closure of the chain of __wrapped__.
    function = getattr(function, "__func__", function)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook.hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
