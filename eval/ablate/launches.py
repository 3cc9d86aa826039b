"""Counting launches of Triton and Gluon kernels, by Triton's own hook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triton import knobs


@dataclass
class Launches:
    count: int = 0

    def add(self, _metadata) -> None:
        self.count += 1


@contextmanager
def count_launches() -> Iterator[Launches]:
    """Count the launches inside of the block."""
    launches = Launches()
    knobs.runtime.launch_enter_hook.add(launches.add)
    try:
        yield launches
    finally:
        knobs.runtime.launch_enter_hook.remove(launches.add)
