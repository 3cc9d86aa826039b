"""Decode attention for SGLang that reads every shared KV prefix once.

Importing the package is cheap: it pulls in neither sglang nor a CUDA context.
"""

from pathlib import Path

__version__ = "0.1.2"

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file():
    # A checkout keeps kernels/ and patches/ beside this package; the wheel puts them inside it.
    __path__.append(str(_ROOT))

__all__ = ["Lse", "PrefixDecodeWrapper", "__version__"]


def __getattr__(name: str):
    """Public names are imported at first use, so that importing the package stays cheap."""
    if name == "PrefixDecodeWrapper":
        from sgl_prefix_attn.wrapper import PrefixDecodeWrapper

        return PrefixDecodeWrapper
    if name == "Lse":
        from sgl_prefix_attn.lse import Lse

        return Lse
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
