"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows of cells below their column names."""
    lines = (columns, ["---"] * len(columns), *rows)
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)
