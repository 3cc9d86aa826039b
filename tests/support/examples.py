"""How many examples hypothesis draws, and which of many cases a test tries."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from hypothesis import settings

T = TypeVar("T")
_ALL = 100  # max_examples of hypothesis' default profile


def examples(count: int) -> settings:
    """So many, or the share of them that the profile asks for: make check has one of its own
    (tests/conftest.py)."""
    drawn = max(1, count * settings.default.max_examples // _ALL)
    return settings(max_examples=drawn, deadline=None)


def chosen(ordered: Sequence[T], most: int) -> list[T]:
    """At most so many of them: the first, the last and what lies evenly between."""
    places = np.linspace(0, len(ordered) - 1, min(most, len(ordered))).round().astype(int)
    return [ordered[i] for i in places]
