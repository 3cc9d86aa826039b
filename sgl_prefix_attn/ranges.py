"""Whole numbers in short: 0-2, 5."""

from collections.abc import Iterable


def stretches(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """List (first, how many) of each stretch of neighbours among ascending numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def in_short(numbers: Iterable[int]) -> str:
    """Write `0-2, 5` for 0, 1, 2, 5, in any order."""
    runs = stretches(sorted(numbers))
    return ", ".join(str(a) if n == 1 else f"{a}-{a + n - 1}" for a, n in runs)
