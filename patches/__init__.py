"""SGLang hooks, one a file: TARGET, WHY, SGLANG (versions it was tried with) and the function.

SGLang applies hooks after register() has returned and only logs one that fails, so the backend's
constructor calls verify_applied().
"""

from __future__ import annotations

import pkgutil

from sgl_prefix_attn.patches import (
    batch_requests,
    graph_capture,
    graph_gate,
    graph_key,
    remaps,
    server_arguments,
)

# Hooks that `--attention-backend prefix` relies on.
PATCHES = [server_arguments, batch_requests, remaps, graph_capture, graph_key, graph_gate]

_registered = False


def register_all() -> None:
    """Hand every hook to SGLang's HookRegistry, once a process."""
    global _registered
    if _registered:
        return
    _registered = True
    for patch in PATCHES:
        patch.register()
    from sgl_prefix_attn import cpu_platform

    if cpu_platform.is_active():
        from sgl_prefix_attn.patches import cpu_index_helpers

        cpu_index_helpers.register()


def missing() -> list[str]:
    """Targets of PATCHES whose attribute in this process is not wrapped by our hook."""
    return [patch.TARGET for patch in PATCHES if not _is_applied(patch)]


def verify_applied() -> None:
    """Raise RuntimeError, with what to do, when a needed hook is not in place."""
    absent = missing()
    if not absent:
        return
    versions = ", ".join(sorted({version for patch in PATCHES for version in patch.SGLANG}))
    raise RuntimeError(
        f"--attention-backend prefix: SGLang did not apply the hook on {', '.join(absent)}. "
        f"Supported is SGLang {versions}; install it (pip install sglang=={versions}), and check "
        f"that SGLANG_PLUGINS, if set, names prefix_attn. `sgl-prefix-attn doctor` tells more."
    )


def _is_applied(patch) -> bool:
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
