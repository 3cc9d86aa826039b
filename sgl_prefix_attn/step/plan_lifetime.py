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

from collections.abc import Sequence

import numpy as np

from sgl_prefix_attn.paths.tree_reader import KvMapping, RunningBatch, remaps_of


class PlanLifetime:
    """Tracks one plan. Use per decode step: stale(), then planned() if stale, then stepped().

    Keeps references to the requests and nodes, so that an address cannot be reused meanwhile.
    Requests and tree nodes are equal only to themselves. A step in which nothing changed compares
    one list of requests and one string of bytes; it reads no request, whose memory is cold.
    """

    def __init__(self):
        self._invalid: str | None = "first"
        self._reqs: list = []
        self._mapping = KvMapping([], [], [])
        # What SGLang's list of requests and its remaps were when all was as planned.
        self._compared: tuple[Sequence, int | None] = ((), None)
        self._next_lens = np.zeros(0, np.int64)
        self._appends_left = 0

    def stale(self, batch: RunningBatch) -> str | None:
        """Say why the batch about to decode needs a new plan; None where it needs none.

        As long as the cache's count of remaps and SGLang's list of requests stay (the object:
        SGLang makes another when requests come, go or are retracted), so does the mapping.
        """
        if self._invalid is not None:
            return self._invalid
        if self._reqs != batch.reqs:
            return "composition"
        remaps = remaps_of(batch.tree_cache)
        list_then, remaps_then = self._compared
        if batch.reqs is not list_then or remaps is None or remaps != remaps_then:
            if KvMapping.of(batch.reqs).differs_from(self._mapping):
                return "mapping"
            self._compared = batch.reqs, remaps
        # As bytes: in a running server numpy's comparison takes several times as long.
        if self._next_lens.tobytes() != batch.seq_lens.tobytes():
            return "lengths"
        if self._appends_left <= 0:
            return "headroom"
        return None

    def planned(self, batch: RunningBatch, appends_left: int, has_grown: bool = False) -> None:
        """Note that a plan was made for this batch; its own step needs no append. has_grown: all
        but the lengths is as it was."""
        self._invalid = None
        if not has_grown:
            self._reqs = list(batch.reqs)
            self._mapping = KvMapping.of(batch.reqs)
            self._compared = (), None
        self._next_lens = batch.seq_lens.copy()
        # stepped() is also called for the planned step itself, whose token the plan holds.
        self._appends_left = appends_left + 1

    def stepped(self) -> None:
        """Note that a step runs by the plan or decision: every request grows by one token."""
        self._next_lens += 1
        self._appends_left -= 1

    def jumped(self, seq_lens: np.ndarray) -> None:
        """Accept lengths that grew by several tokens each, where no plan had to hold them."""
        if self._next_lens.size == seq_lens.size:
            self._next_lens = seq_lens.copy()

    def invalidate(self, cause: str) -> None:
        """Make the next step plan anew and report this cause."""
        if self._invalid is None:
            self._invalid = cause
