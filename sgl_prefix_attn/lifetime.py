"""When a plan is still valid: the conditions one by one, each with the cause that it reports.

first        nothing has been planned yet
capture      a CUDA graph was captured since, which overwrote the plan's buffers
composition  other requests, or another order
mapping      a request's path, protected length or KV allocation changed: SGLang re-maps slots
             when it finds duplicates (cache_unfinished_req) and when a request is retracted
lengths      the lengths are not the plan's plus the prefix steps since: a stock, mixed or
             otherwise unplanned step came between, and its tokens were never appended
headroom     a request's index segment is full
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not

import numpy as np

CAUSES = ("first", "capture", "composition", "mapping", "lengths", "headroom")


class PlanLifetime:
    """Tracks one plan. Use per decode step: stale(), then planned() if stale, then stepped().

    Keeps references to the requests and nodes, so that an address cannot be reused meanwhile.
    A step in which nothing changed costs four list comparisons by identity and one of lengths.
    """

    def __init__(self):
        self._invalid: str | None = "first"
        self._reqs: list = []
        self._nodes: list = []
        self._protected: list = []
        self._allocations: list = []
        self._next_lens = np.zeros(0, dtype=np.int64)
        self._appends_left = 0

    def stale(self, reqs: Sequence, seq_lens: np.ndarray) -> str | None:
        """Why the batch about to decode (seq_lens int [B]) needs a new plan, or None."""
        if self._invalid is not None:
            return self._invalid
        if len(self._reqs) != len(reqs) or any(map(is_not, self._reqs, reqs)):
            return "composition"
        if (
            any(map(is_not, self._nodes, [req.last_node for req in reqs]))
            or self._protected != [req.cache_protected_len for req in reqs]
            # With the radix cache off the other two never change; a new allocation does. By
            # identity: SGLang's ReqKvInfo compares by value.
            or any(map(is_not, self._allocations, [req.kv for req in reqs]))
        ):
            return "mapping"
        if not (self._next_lens == seq_lens).all():  # the batch is as large: same requests
            return "lengths"
        if self._appends_left <= 0:
            return "headroom"
        return None

    def planned(self, reqs: Sequence, seq_lens: np.ndarray, appends_left: int) -> None:
        """A plan was made for this batch; the step that follows needs no append from it."""
        self._invalid = None
        self._reqs = list(reqs)
        self._nodes = [req.last_node for req in reqs]
        self._protected = [req.cache_protected_len for req in reqs]
        self._allocations = [req.kv for req in reqs]
        self._next_lens = np.array(seq_lens, dtype=np.int64)
        # stepped() is also called for the planned step itself, whose token the plan holds.
        self._appends_left = appends_left + 1

    def stepped(self) -> None:
        """A prefix step runs on the plan: every request grows by one token."""
        self._next_lens += 1
        self._appends_left -= 1

    def invalidate(self, cause: str) -> None:
        """The next step plans anew and reports this cause (one of CAUSES)."""
        if self._invalid is None:
            self._invalid = cause
