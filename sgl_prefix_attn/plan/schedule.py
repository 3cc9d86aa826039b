"""Which CTA runs which work item, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ticket:
    """One work item for one KV head on one CTA; times in what in_rounds was given."""

    cta: int
    item: int
    head: int
    start: float
    end: float


def in_rounds(costs: Sequence[float], heads: int, ctas: int) -> Iterator[Ticket]:
    """Deal the tickets of items that cost so much in turn to all CTAs, every second round
    backwards, as Hopper's kernels do. Nearly so do the portable ones, whose CTAs take the next
    ticket when they are free."""
    free = [0.0] * ctas
    for ticket in range(len(costs) * heads):
        turn, place = divmod(ticket, ctas)
        cta = place if turn % 2 == 0 else ctas - 1 - place
        item, head = divmod(ticket, heads)
        start = free[cta]
        free[cta] = start + costs[item]
        yield Ticket(cta, item, head, start, free[cta])
