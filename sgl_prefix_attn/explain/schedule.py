"""Which CTA runs which work item, as the planners estimate it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sgl_prefix_attn.explain.view import PlanView
from sgl_prefix_attn.plan.work import ITEM_TOKENS, SHARED_CTAS, SHARED_TOKEN, TAIL_CTAS


@dataclass(frozen=True)
class Run:
    """One work item for one KV head on one CTA; times in KV tokens of a tails CTA, or in what
    in_rounds was given."""

    cta: int
    item: int
    head: int
    start: float
    end: float


def num_ctas(view: PlanView, tile: int) -> int:
    """CTAs of the tile's grid: as many as fit the GPU."""
    is_shared = tile >= view.tile_set.first_shared
    return view.tile_set.num_sms * (SHARED_CTAS if is_shared else TAIL_CTAS)


def schedule(view: PlanView, tile: int) -> Iterator[Run]:
    """Tickets of the tile's queue in their order, each taken by the CTA that is free first.

    Ticket t is item t // KV heads for KV head t % KV heads. What plan/work.py knows beyond that is
    left out: tails CTAs wait where shared ones leave no room on an SM.
    """
    heads = view.heads.num_kv_heads
    block_n = view.tile_set.tiles[tile].block_n
    speed = SHARED_TOKEN if tile >= view.tile_set.first_shared else 1.0
    free = [(0.0, cta) for cta in range(num_ctas(view, tile))]
    for i, item in enumerate(view.queues[tile]):
        cost = (-(-item.tokens // block_n) * block_n + ITEM_TOKENS) * speed
        for head in range(heads):
            start, cta = free[0]
            heapq.heapreplace(free, (start + cost, cta))
            yield Run(cta, i, head, start, start + cost)


def in_rounds(costs: Sequence[float], heads: int, ctas: int) -> Iterator[Run]:
    """Tickets of row tiles, items that cost so much: dealt in turn to all CTAs, every second round
    backwards."""
    free = [0.0] * ctas
    for ticket in range(len(costs) * heads):
        turn, place = divmod(ticket, ctas)
        cta = place if turn % 2 == 0 else ctas - 1 - place
        item, head = divmod(ticket, heads)
        start = free[cta]
        free[cta] = start + costs[item]
        yield Run(cta, item, head, start, free[cta])
