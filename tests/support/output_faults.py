"""Outputs that are wrong in a request or two, as of faulty kernels: every oracle finds each.

A problem has a short request 0, whose outputs are large, and the faults are in request 1, or in 1
and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.support.problems import Problem, attend

Slots = list[torch.Tensor]


def _drop(slots: Slots, count: int, where: float) -> Slots | None:
    """Request 1 without `count` tokens: its first (where = 0), its last (1), or between."""
    one = slots[1]
    if one.numel() <= count:
        return None
    first = int(where * (one.numel() - count))
    return [slots[0], torch.cat([one[:first], one[first + count :]]), *slots[2:]]


def _drop_of_few(slots: Slots) -> Slots | None:
    return _drop(slots, 1, 0.5) if slots[1].numel() <= 64 else None


def _swap_tails(slots: Slots) -> Slots | None:
    one, other = slots[1:3]
    shared = min(one.numel(), other.numel())
    shared = int((one[:shared] == other[:shared]).long().cumprod(0).sum())
    tails = one[shared:], other[shared:]
    if min(map(len, tails)) == 0 or (max(map(len, tails)) < 16 and shared > 64):
        return None  # so little of so much: as a few dropped tokens
    return [slots[0], torch.cat([one[:shared], tails[1]]), torch.cat([other[:shared], tails[0]])]


def _one_column_too_many(slots: Slots) -> Slots | None:
    """Request 1, of few tokens, sees the newest token of request 2."""
    if slots[1].numel() > 64:
        return None
    return [slots[0], torch.cat([slots[1], slots[2][-1:]]), slots[2]]


_OF_SLOTS: dict[str, Callable[[Slots], Slots | None]] = {
    "one_token_of_64_dropped": _drop_of_few,
    "tails_swapped": _swap_tails,
    "a_column_too_many": _one_column_too_many,
    **{
        f"{count}_tokens_dropped_{name}": partial(_drop, count=count, where=where)
        for count in (16, 64)
        for name, where in (("first", 0.0), ("between", 0.5), ("last", 1.0))
    },
}


def _zero(out: torch.Tensor) -> None:
    out[1] = 0


def _swap_heads(out: torch.Tensor) -> None:
    out[1, [0, 1]] = out[1, [1, 0]]


_IN_PLACE = {"zeroed": _zero, "a_head_swapped": _swap_heads}
FAULTS = (*_IN_PLACE, *_OF_SLOTS)


def right(problem: Problem) -> torch.Tensor:
    """Output [B, Hq, D] in the problem's dtype of a method that only rounds its result."""
    return _output(problem, problem.slots())


def planted(problem: Problem, fault: str) -> torch.Tensor | None:
    """right() with a fault of FAULTS, None where the requests are too short or too long for it."""
    if fault in _IN_PLACE:
        out = right(problem)
        _IN_PLACE[fault](out)
        return out
    slots = _OF_SLOTS[fault](problem.slots())
    return None if slots is None else _output(problem, slots)


def _output(problem: Problem, slots: Slots) -> torch.Tensor:
    rows = [attend(problem, i, of_row, torch.float32)[0] for i, of_row in enumerate(slots)]
    return torch.stack(rows).to(problem.dtype)
