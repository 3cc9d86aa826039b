"""Hands the hooks in patches/ to SGLang. Each is a file of its own:

    TARGET  dotted name of what it hooks        TYPE  before, after, around or replace
    WHY     the reason, for doctor              hook  the function (SGLang's HookType has its form)

SGLang applies hooks after register() has returned and only logs one that fails, so the backend is
built only after verify_applied().
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from sgl_prefix_attn import patches
from sgl_prefix_attn.cpu import platform
from sgl_prefix_attn.plugin.versions import INSTALL, SUPPORTED, Release


def load(name: str) -> ModuleType:
    """Import the hook sgl_prefix_attn.patches.<name>."""
    return importlib.import_module(f"{patches.__name__}.{name}")


def register_all(release: Release) -> None:
    """Hand every hook of a release to SGLang's HookRegistry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    cpu_hooks = release.cpu_hooks if platform.is_active() else ()
    for patch in map(load, (*release.hooks, *cpu_hooks)):
        HookRegistry.register(patch.TARGET, patch.hook, HookType(patch.TYPE))


def verify_applied(release: Release) -> None:
    """Raise RuntimeError, with what to do, when a needed hook is not in place."""
    needed = map(load, release.hooks)
    absent = [patch.TARGET for patch in needed if not _is_applied(patch)]
    if absent:
        raise RuntimeError(
            f"--attention-backend prefix: SGLang did not apply the hook on {', '.join(absent)}. "
            f"Supported is SGLang {SUPPORTED}; install it ({INSTALL}), and check that "
            "SGLANG_PLUGINS, if set, names prefix_attn. `sgl-prefix-attn doctor` tells more."
        )


def _is_applied(patch: ModuleType) -> bool:
    try:
        function = pkgutil.resolve_name(patch.TARGET)
    except (ImportError, AttributeError):
        return False
    # HookRegistry wraps functions in functions: ours is in a closure of the chain of __wrapped__.
    function = getattr(function, "__func__", function)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is patch.hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
