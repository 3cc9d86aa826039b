"""Where the commands print tables, and what they say while they work."""

import contextlib
import os
import sys
from collections.abc import Iterator
from threading import Timer

from rich.console import Console
from rich.progress import Progress, TaskID

UNFOLDED = 1000  # columns
LONG_S = 3.0  # what takes longer says so


def table_console(most: int = UNFOLDED) -> Console:
    """Return a console that fits tables to a terminal of at most so many columns; for a file or a
    pipe it has `most`, where UNFOLDED folds nothing."""
    console = Console(highlight=False)
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    console.width = min(console.width, most) if fits else most
    return console


def progress() -> Progress:
    """Return bars on stderr, which only a terminal shows."""
    return Progress(transient=True, console=Console(stderr=True), disable=not sys.stderr.isatty())


@contextlib.contextmanager
def stage(bars: Progress, what: str, total: float | None = None) -> Iterator[TaskID]:
    """Give what is done in it a bar; where nobody watches one, a line if it takes longer than
    LONG_S."""

    def say() -> None:
        print(f"{what} ...", file=sys.stderr, flush=True)

    timer = Timer(LONG_S, say if bars.disable else lambda: None)
    timer.daemon = True  # an interrupted command does not wait for it
    timer.start()
    task = bars.add_task(what, total=total)
    try:
        yield task
    finally:
        timer.cancel()
        bars.remove_task(task)


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Say on stderr what is being done in it, as stage() does."""
    with progress() as bars, stage(bars, what):
        yield
