"""Where the commands print tables and draw."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

UNFOLDED = 1000  # columns


def table_console() -> Console:
    """Return a console that fits tables to a terminal, and folds nothing for a file or a pipe."""
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if fits else UNFOLDED)


def add_png(parser: argparse.ArgumentParser) -> None:
    """Add --png."""
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="write a plot to FILE (needs matplotlib)"
    )


@contextlib.contextmanager
def needs_matplotlib() -> Iterator[None]:
    """Import what draws --png in it. Raises ValueError where that cannot be."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"--png needs matplotlib ({error}): pip install matplotlib") from None
