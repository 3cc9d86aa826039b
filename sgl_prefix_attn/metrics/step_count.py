"""Counts each decode step: its KV tokens, carried on from the last evaluation of the batch."""

from collections.abc import Sequence

import numpy as np

from sgl_prefix_attn.metrics.counters import KvTokens, StepCounters
from sgl_prefix_attn.metrics.intervals import StepIntervals
from sgl_prefix_attn.records import PREFIX, Decision, PlanStats


class StepCount:
    """Use per decode step: start(), after an evaluation evaluated(), then step()."""

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
        """Note that something else than a usual decode step runs: the time around it is no step's
        time."""
        self._intervals.interrupt()

    def evaluated(self, stats: PlanStats, variant: str) -> None:
        """Note that from now on the batch runs this plan, or stock kernels in spite of it."""
        total = stats.kv_tokens_query_centric
        read = stats.kv_tokens_read if variant == PREFIX else total
        self._first = KvTokens(read, total, stats.kv_tokens_unique)
        self._steps_since = 0

    def step(self, decision: Decision, seq_lens: np.ndarray, is_compared: bool) -> None:
        """Count a step: of the batch that was evaluated, to which every step since then has added a
        private token a request, or a stock step whose batch was not compared with it."""
        grown = seq_lens.size * self._steps_since
        self._steps_since += 1
        if is_compared:
            kv_tokens = KvTokens(*(tokens + grown for tokens in self._first))
        else:
            total = sum(seq_lens.tolist())
            kv_tokens = KvTokens(total, total, 0)
        self._counters.step(decision, kv_tokens)
        self._intervals.ran(decision.variant)
