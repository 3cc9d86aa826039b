"""Lets a torchvision that is linked with CUDA libraries be imported beside a CPU-only torch.

Package indexes often hold one torchvision wheel, built for CUDA. Its C++ operators then cannot
load, and `import torchvision` stops at the first operator schema it does not find; sglang and
transformers import torchvision. Declaring those schemas is enough, nothing on the CPU path calls
them. requirements/install.py copies this file into the virtual environment's site-packages, beside
a .pth line that imports it at start-up; it costs nothing until torchvision is imported.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")


def _declare_missing_operators(package_dir: Path):
    """The library object that holds the declared schemas, or None if torchvision's own load."""
    import torch

    extension = next(package_dir.glob("_C*.so"), None)
    if torch.version.cuda is not None or extension is None:
        return None
    try:
        torch.ops.load_library(str(extension))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in _OPERATORS:
            library.define(name + _SCHEMA)
        return library
    return None


class _TorchvisionFinder:
    """A meta path finder that never finds: it only acts before torchvision's first import."""

    library = None  # kept alive: the schemas go away with the object

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(cls)
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.submodule_search_locations:
                cls.library = _declare_missing_operators(Path(spec.submodule_search_locations[0]))
        return None


sys.meta_path.insert(0, _TorchvisionFinder)
