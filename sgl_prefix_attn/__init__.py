"""Decode attention for SGLang that reads every shared KV prefix once.

Importing the package is cheap: it pulls in neither sglang nor a CUDA context.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_prefix_attn.api.wrapper import PrefixAttentionWrapper
    from sgl_prefix_attn.execute.lse import Lse

__version__ = "0.2.0.dev0"  # of the next release

__all__ = ["Lse", "PrefixAttentionWrapper", "__version__"]


_MODULES = {"Lse": "execute.lse", "PrefixAttentionWrapper": "api.wrapper"}
_REPLACED = {"PrefixDecodeWrapper": "PrefixAttentionWrapper"}


def __getattr__(name: str):
    """Import public names at first use, so that importing the package stays cheap."""
    if name in _REPLACED:
        raise AttributeError(f"{__name__}.{name} is gone: use {__name__}.{_REPLACED[name]}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """List what is imported at first use, too."""
    return sorted({*globals(), *_MODULES})
