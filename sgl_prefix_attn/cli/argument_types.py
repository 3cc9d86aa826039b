"""A type of command-line arguments: argparse puts the argument's name before what it raises."""

from argparse import ArgumentTypeError


def count(text: str) -> int:
    """An integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no integer") from None
    if value < 1:
        raise ArgumentTypeError(f"must be at least 1, got {value}")
    return value
