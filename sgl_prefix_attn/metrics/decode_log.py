"""One line in the log every few decode steps, beside SGLang's own: what was chosen and why."""

import logging
from collections import Counter
from typing import Any

from sgl_prefix_attn.metrics.counters import EXTENDED, KvSize, StepCounters
from sgl_prefix_attn.records import Decision

logger = logging.getLogger(__name__)


class DecodeLog:
    """Told of every decode step; after each `interval` of them it logs what came since.

    interval is SGLang's decode_log_interval, in decode steps of this backend.
    """

    def __init__(self, interval: int, size: KvSize):
        self._interval = interval
        self._size = size
        self._steps = 0
        # What the last line was written from: steps, KV tokens, plans and seconds of planning.
        self._before = [Counter[Any]() for _ in range(4)]

    def step(self, decision: Decision, counters: StepCounters) -> None:
        """Note that a step was counted."""
        self._steps += 1
        if self._steps % self._interval == 0:
            logger.info("%s", self._line(decision, counters))

    def _line(self, last: Decision, counters: StepCounters) -> str:
        """Write the line, and tell /metrics its share; KV bytes: over the layers that it counts,
        times: of the last decision."""
        c = counters
        now = [Counter(total) for total in (c.steps, c.kv_tokens, c.plans, c.plan_seconds)]
        steps, kv_tokens, plans, seconds = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        read, query_centric = kv_tokens["read"], kv_tokens["query_centric"]
        saved, gb = query_centric - read, self._size.token_bytes / 1e9
        share = saved / query_centric if query_centric else 0.0
        if c.exporter is not None:
            c.exporter.saved_share(share)
        parts = [
            f"Prefix attention, #step: {steps.total()}",
            *(f"{d.variant} ({d.reason}): {count}" for d, count in steps.most_common()),
            f"KV read: {read * gb:.3f} GB",
            f"KV saved: {saved * gb:.3f} GB ({share:.1%})",
        ]
        if (times := last.predicted) is not None:
            parts.append(
                f"predicted us/layer: prefix {times.prefix_us:.1f}, stock {times.stock_us:.1f}"
            )
        causes = ", ".join(f"{cause} {count}" for cause, count in plans.most_common())
        parts.append(f"#plan: {plans.total()}" + (f" ({causes})" if causes else ""))
        planning = seconds.total() - seconds[EXTENDED]
        parts.append(f"planning (ms): {1e3 * planning:.2f}")
        if (stats := c.last_plan) is not None:
            parts.append(f"last plan: {stats.num_tiles} tiles in {stats.num_items} work items")
        return ", ".join(parts)
