"""Counts each decode step: its KV tokens, carried on from the last evaluation of the batch."""

from collections.abc import Sequence

import numpy as np

from sgl_prefix_attn.metrics.counters import KvTokens, StepCounters
from sgl_prefix_attn.metrics.intervals import StepIntervals
from sgl_prefix_attn.records import PREFIX, Decision, PlanStats

# Steps that are counted together unless they are exported: a scrape must find the exact numbers.
_BATCH = 8


class StepCount:
    """Use per decode step: start(), after an evaluation evaluated(), then known() or unread().

    The counters may lag behind by less than _BATCH steps until flush().
    """

    def __init__(self, counters: StepCounters):
        self._counters = counters
        self._intervals = StepIntervals()
        self._first = KvTokens(0, 0, 0)
        self._steps_since = 0
        self._decision: Decision | None = None  # of the steps not counted yet ...
        self._batch_size = 0
        self._pending = 0  # ... and how many they are
        self._batch = _BATCH if counters.exporter is None else 1
        if counters.decode_log is not None:
            self._batch = min(self._batch, counters.decode_log.interval)

    def start(self, reqs: Sequence) -> None:
        if self._counters.exporter is None:
            return
        interval = self._intervals.start(reqs)
        if interval is not None:
            self._counters.exporter.interval(*interval)

    def interrupt(self) -> None:
        """Something else than a usual decode step runs: the time around it is no step's time."""
        self._intervals.interrupt()

    def evaluated(self, stats: PlanStats, variant: str) -> None:
        """From now on the batch runs this plan, or stock kernels in spite of it."""
        self.flush()
        total = stats.kv_tokens_query_centric
        read = stats.kv_tokens_read if variant == PREFIX else total
        self._first = KvTokens(read, total, stats.kv_tokens_unique)
        self._steps_since = 0

    def known(self, decision: Decision, batch_size: int) -> None:
        """Count a step of the batch that was evaluated: since then every request has grown by one
        private token per step."""
        if decision is not self._decision or batch_size != self._batch_size:
            self.flush()
            self._decision, self._batch_size = decision, batch_size
        self._pending += 1
        self._steps_since += 1
        if self._pending >= self._batch:
            self.flush()
        self._intervals.ran(decision.variant)

    def unread(self, decision: Decision, seq_lens: np.ndarray) -> None:
        """Count a stock step whose batch was not compared with the one evaluated."""
        self.flush()
        self._steps_since += 1
        total = sum(seq_lens.tolist())
        self._counters.step(decision, KvTokens(total, total, 0))
        self._intervals.ran(decision.variant)

    def flush(self) -> None:
        """Count what is pending."""
        steps, self._pending = self._pending, 0
        if steps == 0 or self._decision is None:
            return
        first = self._steps_since - steps
        grown = self._batch_size * (first * steps + steps * (steps - 1) // 2)
        tokens = KvTokens(*(steps * count + grown for count in self._first))
        self._counters.step(self._decision, tokens, steps)
