"""One line in the log every few decode steps, beside SGLang's own: what was chosen and why."""

from __future__ import annotations

import logging
from collections import Counter

from sgl_prefix_attn.metrics.counters import KvSize, StepCounters
from sgl_prefix_attn.records import Decision

logger = logging.getLogger(__name__)


class DecodeLog:
    """Told of every decode step; after each `interval` of them it logs what came since.

    interval is SGLang's decode_log_interval, in decode steps of this backend.
    """

    def __init__(self, interval: int, size: KvSize):
        self.interval = interval
        self._size = size
        self._steps = 0
        self._before = _Totals(StepCounters())

    def step(self, decision: Decision, counters: StepCounters, steps: int = 1) -> None:
        """So many steps were counted."""
        lines = self._steps // self.interval
        self._steps += steps
        if self._steps // self.interval > lines:
            now = _Totals(counters)
            logger.info("%s", describe(now, self._before, decision, counters, self._size))
            self._before = now


class _Totals:
    """A copy of the counters that a line reports the growth of."""

    def __init__(self, counters: StepCounters):
        self.steps = Counter(counters.steps)
        self.kv_tokens = Counter(counters.kv_tokens)
        self.plans = Counter(counters.plans)
        self.plan_seconds = sum(counters.plan_seconds.values())


def describe(
    now: _Totals, before: _Totals, last: Decision, counters: StepCounters, size: KvSize
) -> str:
    """Write the line; KV bytes over all layers of this rank, predictions of the last decision."""
    steps, plans = now.steps - before.steps, now.plans - before.plans
    kv_tokens = now.kv_tokens - before.kv_tokens
    read, query_centric = (
        kv_tokens[kind] * size.token_bytes / 1e9 for kind in ("read", "query_centric")
    )
    saved = query_centric - read
    share = saved / query_centric if query_centric else 0.0  # no layers: no bytes
    parts = [
        f"Prefix attention, #step: {steps.total()}",
        *(f"{d.variant} ({d.reason}): {count}" for d, count in steps.most_common()),
        f"KV read: {read:.3f} GB",
        f"KV saved: {saved:.3f} GB ({share:.1%})",
    ]
    if last.predicted is not None:
        times = last.predicted
        parts.append(
            f"predicted us/layer: prefix {times.prefix_us:.1f}, stock {times.stock_us:.1f}"
        )
    causes = ", ".join(f"{cause} {count}" for cause, count in plans.most_common())
    parts.append(f"#plan: {plans.total()}" + (f" ({causes})" if causes else ""))
    parts.append(f"planning (ms): {1e3 * (now.plan_seconds - before.plan_seconds):.2f}")
    if counters.last_plan is not None:
        stats = counters.last_plan
        parts.append(f"last plan: #pack: {stats.num_packs}, #work-item: {stats.num_items}")
    return ", ".join(parts)
