"""Counts each decode step: its KV tokens, carried on from the last evaluation of the batch."""

from collections.abc import Sequence

import numpy as np

from sgl_prefix_attn.metrics.counters import KvTokens, StepCounters
from sgl_prefix_attn.metrics.intervals import StepIntervals
from sgl_prefix_attn.records import PREFIX, Decision, PlanStats


class StepCount:
    """Use per decode step: start(), after an evaluation evaluated(), then known() or unread()."""

    def __init__(self, counters: StepCounters):
        self._counters = counters
        self._intervals = StepIntervals()
        self._first = KvTokens(0, 0, 0)
        self._steps_since = 0

    def start(self, reqs: Sequence) -> None:
        exporter = self._counters.exporter
        if exporter is not None and (interval := self._intervals.start(reqs)) is not None:
            exporter.interval(*interval)

    def interrupt(self) -> None:
        """Something else than a usual decode step runs: the time around it is no step's time."""
        self._intervals.interrupt()

    def evaluated(self, stats: PlanStats, variant: str) -> None:
        """From now on the batch runs this plan, or stock kernels in spite of it."""
        total = stats.kv_tokens_query_centric
        read = stats.kv_tokens_read if variant == PREFIX else total
        self._first = KvTokens(read, total, stats.kv_tokens_unique)
        self._steps_since = 0

    def known(self, decision: Decision, batch_size: int) -> None:
        """Count a step of the batch that was evaluated: since then every request has grown by one
        private token per step."""
        read, total, unique = self._first
        grown = batch_size * self._steps_since
        self._steps_since += 1
        self._counters.step(decision, KvTokens(read + grown, total + grown, unique + grown))
        self._intervals.ran(decision.variant)

    def unread(self, decision: Decision, seq_lens: np.ndarray) -> None:
        """Count a stock step whose batch was not compared with the one evaluated."""
        self._steps_since += 1
        total = sum(seq_lens.tolist())
        self._counters.step(decision, KvTokens(total, total, 0))
        self._intervals.ran(decision.variant)
