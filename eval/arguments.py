"""Types of command-line arguments: argparse puts the argument's name before what they raise."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def amount(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return value


def several(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A list of them, separated by commas."""
    return lambda text: [kind(part) for part in text.split(",")]
