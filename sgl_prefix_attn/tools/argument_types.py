"""Types of command-line arguments: argparse puts the argument's name before what they raise."""

import os
from argparse import ArgumentTypeError
from pathlib import Path

LARGEST = (1 << 31) - 1  # counts become int32, and sizes of arrays
MOST = 1_000_000  # milliseconds, requests a second


def count(text: str, least: int = 1) -> int:
    """Read an integer of at least `least` that an int32 holds."""
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no integer") from None
    if value < least:
        raise ArgumentTypeError(f"must be at least {least}, got {value}")
    if value > LARGEST:
        raise ArgumentTypeError(f"must be at most {LARGEST}, got {value}")
    return value


def seed(text: str) -> int:
    """Read an integer of at least 0 that an int32 holds."""
    return count(text, least=0)


def amount(text: str) -> float:
    """Read a number above 0 and up to a million."""
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value <= MOST:
        raise ArgumentTypeError(f"must be above 0 and at most {MOST:,}, got {text}")
    return value


def new_file(text: str) -> Path:
    """Take a file that can be written, in a folder that is there."""
    path = Path(text)
    try:
        writable = not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:  # a folder that may not be searched, too long a name
        raise ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    if not writable:
        raise ArgumentTypeError(f"{text} cannot be written, or its folder is missing")
    return path
