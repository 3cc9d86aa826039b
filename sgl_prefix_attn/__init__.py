"""Decode attention for SGLang that reads every shared KV prefix once.

Importing the package is cheap: it pulls in neither sglang nor a CUDA context.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_prefix_attn.api.attention_wrapper import PrefixAttentionWrapper
    from sgl_prefix_attn.api.wrapper import PrefixDecodeWrapper
    from sgl_prefix_attn.execute.lse import Lse

__version__ = "0.1.2"

__all__ = ["Lse", "PrefixAttentionWrapper", "PrefixDecodeWrapper", "__version__"]


def __getattr__(name: str):
    """Import public names at first use, so that importing the package stays cheap."""
    modules = {
        "Lse": "execute.lse",
        "PrefixAttentionWrapper": "api.attention_wrapper",
        "PrefixDecodeWrapper": "api.wrapper",
    }
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{modules[name]}"), name)
