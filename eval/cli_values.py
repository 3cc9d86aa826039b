"""Types of command-line arguments: argparse puts the argument's name before what they raise."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from sgl_prefix_attn.calibrate.writing import try_folder
from sgl_prefix_attn.cli.argument_types import amount as amount

T = TypeVar("T")


def several(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Make a parser of lists of them, separated by commas."""
    return lambda text: [kind(part) for part in text.split(",")]


def output(text: str) -> str:
    """Parse the path of a file to write, whose folder is made: a run of minutes must not end where
    nothing can be written."""
    if Path(text).is_dir():
        raise ArgumentTypeError(f"{text} cannot be written: it is a folder")
    try:
        try_folder(Path(text))
    except OSError as error:
        raise ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return text


def gpu() -> torch.device:
    """Return the first GPU. Raises ValueError where there is none."""
    if not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} sees no CUDA GPU here")
    return torch.device("cuda")


def device(text: str) -> torch.device:
    """Parse a device, which must be there if it is a GPU."""
    try:
        found = torch.device(text)
    except RuntimeError as error:
        raise ArgumentTypeError(str(error)) from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentTypeError(
            f"torch {torch.__version__} sees no CUDA GPU here; --device cpu is for small runs"
        )
    return found
