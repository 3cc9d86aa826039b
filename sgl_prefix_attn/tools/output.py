"""Where the commands print tables, and what they show while they work."""

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress

UNFOLDED = 1000  # columns


def table_console(most: int = UNFOLDED) -> Console:
    """Return a console that fits tables to a terminal of at most so many columns; for a file or a
    pipe it has `most`, where UNFOLDED folds nothing."""
    console = Console(highlight=False)
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    console.width = min(console.width or most, most) if fits else most  # COLUMNS may be 0
    return console


def text_console() -> Console:
    """Return a console that leaves folding lines to the terminal."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = console.width or UNFOLDED
    return console


def progress() -> Progress:
    """Return bars on stderr, which only a terminal shows."""
    return Progress(transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty())


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Show what is being done in it."""
    with progress() as bars:
        bars.add_task(what, total=None)
        yield
