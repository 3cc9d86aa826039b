"""When a plan is still valid: the conditions one by one, each with the cause that it reports.

first        nothing has been planned yet
capture      a CUDA graph was captured since, which overwrote the plan's buffers
composition  other requests, or another order
mapping      a request's path, protected length or KV allocation changed: SGLang re-maps slots
             when it finds duplicates (cache_unfinished_req) and when a request is retracted
lengths      the lengths are not the plan's plus the prefix steps since: a stock, mixed or
             otherwise unplanned step came between, and its tokens were never appended
headroom     a request's index segment is full
fault        the step could not be prepared, here or on another tensor-parallel rank
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not

import numpy as np

# Steps whose lengths are worked out together: one numpy call a step is a tenth of its host time.
_AHEAD = 32

CAUSES = ("first", "capture", "composition", "mapping", "lengths", "headroom", "fault")


class PlanLifetime:
    """Tracks one plan. Use per decode step: stale(), then planned() if stale, then stepped().

    Keeps references to the requests and nodes, so that an address cannot be reused meanwhile.
    Requests and tree nodes are equal only to themselves. A step in which nothing changed compares
    one list of requests and one string of bytes; it reads no request, whose memory is cold.
    """

    def __init__(self):
        self._invalid: str | None = "first"
        self._reqs: list = []
        self._nodes, self._protected_lens, self._allocations = _mapping(())
        # What SGLang's list of requests and its remaps were when all was as planned.
        self._compared: tuple[Sequence, int | None] = ((), None)
        self._next_lens = np.zeros(0, np.int64)  # of the first step that _expected does not hold
        self._expected: list[bytes] = []  # lengths of the next steps once asked for, nearest last
        self._appends_left = 0

    def stale(self, reqs: Sequence, seq_lens: np.ndarray, remaps: int | None = None) -> str | None:
        """Why the batch about to decode (seq_lens int [B]) needs a new plan, or None.

        remaps  tree.remaps(); as long as it and SGLang's list (the object: SGLang makes another
                when requests come, go or are retracted) stay, so do nodes and allocations
        """
        if self._invalid is not None:
            return self._invalid
        if self._reqs != reqs:
            return "composition"
        list_then, remaps_then = self._compared
        if reqs is not list_then or remaps is None or remaps != remaps_then:
            if self._is_remapped(reqs):
                return "mapping"
            self._compared = reqs, remaps
        # As bytes: in a running server numpy's comparison takes several times as long.
        if self._next_bytes() != seq_lens.tobytes():
            return "lengths"
        if self._appends_left <= 0:
            return "headroom"
        return None

    def _is_remapped(self, reqs: Sequence) -> bool:
        nodes, lengths, allocations = _mapping(reqs)
        if nodes != self._nodes or lengths != self._protected_lens:
            return True
        # By identity: SGLang's ReqKvInfo compares by value, and one allocated anew may be equal
        # (with the radix cache off nothing else changes then).
        return any(map(is_not, allocations, self._allocations))

    def planned(self, reqs: Sequence, seq_lens: np.ndarray, appends_left: int) -> None:
        """A plan was made for this batch; the step that follows needs no append from it."""
        self._invalid = None
        self._reqs = list(reqs)
        self._nodes, self._protected_lens, self._allocations = _mapping(reqs)
        self._compared = (), None
        self._next_lens, self._expected = seq_lens.copy(), []
        # stepped() is also called for the planned step itself, whose token the plan holds.
        self._appends_left = appends_left + 1

    def stepped(self) -> None:
        """A prefix step runs on the plan: every request grows by one token."""
        if self._expected:
            self._expected.pop()
        else:
            self._next_lens += 1
        self._appends_left -= 1

    def _next_bytes(self) -> bytes:
        """Lengths of the next step."""
        if not self._expected:
            ahead = np.arange(_AHEAD, dtype=self._next_lens.dtype)[::-1, None]
            self._expected = [lens.tobytes() for lens in self._next_lens + ahead]
            self._next_lens += _AHEAD
        return self._expected[-1]

    def invalidate(self, cause: str) -> None:
        """The next step plans anew and reports this cause (one of CAUSES)."""
        if self._invalid is None:
            self._invalid = cause


def _mapping(reqs: Sequence) -> tuple[list, list, list]:
    """What decides where the requests' KV lies."""
    return (
        [req.last_node for req in reqs],
        [req.cache_protected_len for req in reqs],
        [req.kv for req in reqs],
    )
