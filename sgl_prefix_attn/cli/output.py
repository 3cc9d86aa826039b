"""Where the commands print tables."""

import os
import sys

from rich.console import Console

UNFOLDED = 1000  # columns


def table_console() -> Console:
    """Return a console that fits tables to a terminal, and folds nothing for a file or a pipe."""
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if fits else UNFOLDED)
