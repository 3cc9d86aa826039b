"""Tables of what may stand against something, as labels of metrics or in words."""

from collections.abc import Mapping


def first_of(reasons: Mapping[str, object]) -> str | None:
    """Return the first reason of a table that holds, None where none does."""
    return next((reason for reason, holds in reasons.items() if holds), None)
