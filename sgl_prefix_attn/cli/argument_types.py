"""Types of command-line arguments: argparse puts the argument's name before what they raise."""

import math
from argparse import ArgumentTypeError

LARGEST = (1 << 31) - 1  # counts become int32, and sizes of arrays


def count(text: str) -> int:
    """An integer of at least 1 that an int32 holds."""
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no integer") from None
    if value < 1:
        raise ArgumentTypeError(f"must be at least 1, got {value}")
    if value > LARGEST:
        raise ArgumentTypeError(f"must be at most {LARGEST}, got {value}")
    return value


def amount(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return value
