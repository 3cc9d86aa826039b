"""Decode attention for SGLang that reads every shared KV prefix once.

Importing the package is cheap: it pulls in neither sglang nor a CUDA context.
"""

from pathlib import Path

__version__ = "0.1.0"

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file():
    # A checkout keeps kernels/ and patches/ beside this package; the wheel puts them inside it.
    __path__.append(str(_ROOT))
