"""Counts each decode step: its KV tokens, carried on from the last look at the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl_prefix_attn.intervals import StepIntervals
from sgl_prefix_attn.metrics import KvTokens, StepCounters
from sgl_prefix_attn.records import Decision, PlanStats


class StepCount:
    """Use per decode step: start(), after a look looked_*(), then known() or unread()."""

    def __init__(self, counters: StepCounters):
        self._counters = counters
        self._intervals = StepIntervals()
        self._looked = KvTokens(0, 0, 0)
        self._steps_since_look = 0

    def start(self, reqs: Sequence) -> None:
        interval = self._intervals.start(reqs)
        if interval is not None:
            self._counters.interval(*interval)

    def interrupt(self) -> None:
        """Something else than a usual decode step runs: the time around it is no step's time."""
        self._intervals.interrupt()

    def looked_prefix(self, stats: PlanStats) -> None:
        """From now on the batch runs a plan."""
        self._look(stats.kv_tokens_read, stats.kv_tokens_query_centric, stats.kv_tokens_unique)

    def looked_stock(self, seq_lens: np.ndarray, unique: int) -> None:
        """From now on the batch runs stock kernels; unique: distinct KV tokens of its tree."""
        total = int(seq_lens.sum())
        self._look(total, total, unique)

    def _look(self, *tokens: int) -> None:
        self._looked = KvTokens(*tokens)
        self._steps_since_look = 0

    def known(self, decision: Decision, batch_size: int) -> None:
        """A step of the batch that was looked at: since then every request has grown by one
        private token a step."""
        grown = batch_size * self._steps_since_look
        self._steps_since_look += 1
        read, query_centric, unique = self._looked
        self._step(decision, KvTokens(read + grown, query_centric + grown, unique + grown))

    def unread(self, decision: Decision, seq_lens: np.ndarray) -> None:
        """A stock step whose batch was not compared with the one looked at."""
        self._steps_since_look += 1
        total = int(seq_lens.sum())
        self._step(decision, KvTokens(total, total, 0))

    def _step(self, decision: Decision, kv_tokens: KvTokens) -> None:
        self._counters.step(decision, kv_tokens)
        self._intervals.ran(decision.variant)
