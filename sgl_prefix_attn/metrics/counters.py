"""What the decode steps of one backend did: counters in the scheduler process.

exporter.py shows them on SGLang's /metrics, decode_log.py writes a line of them into the log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_prefix_attn.records import Decision, PlanStats

if TYPE_CHECKING:
    from sgl_prefix_attn.metrics.decode_log import DecodeLog
    from sgl_prefix_attn.metrics.exporter import PrometheusExporter

logger = logging.getLogger(__name__)

# How the evaluation of a batch ended: of a decode step, of a batch of several tokens a request, or
# with an error.
PLANNED, EXTENDED, FAILED = "planned", "extended", "failed"


class KvTokens(NamedTuple):
    """KV tokens of one layer in one step: loaded, loaded by kernels that read each request by
    itself, distinct.

    unique is 0 for a stock step whose batch was not evaluated.
    """

    read: int
    query_centric: int
    unique: int


@dataclass(frozen=True)
class KvSize:
    """Attention layers of this rank, and the bytes of one token's K and V over all of them."""

    num_layers: int
    token_bytes: int

    @classmethod
    def of(cls, layers, itemsize: int, latent: bool = False) -> KvSize:
        """Add up the layers of this rank; itemsize: bytes of a KV cache element; latent: values are
        a part of keys."""
        elements = sum(
            x.tp_k_head_num * x.qk_head_dim + (0 if latent else x.tp_v_head_num * x.v_head_dim)
            for x in layers
        )
        return cls(len(layers), elements * itemsize)


@dataclass
class StepCounters:
    """Counters of one backend. exporter and decode_log None: in-process only."""

    exporter: PrometheusExporter | None = None
    decode_log: DecodeLog | None = None
    steps: Counter = field(default_factory=Counter)  # Decision -> decode steps
    extends: Counter = field(default_factory=Counter)  # Decision -> extend batches
    drafts: Counter = field(default_factory=Counter)  # Decision -> rounds of draft steps
    kv_tokens: Counter = field(default_factory=Counter)  # kind -> KV tokens per layer
    plans: Counter = field(default_factory=Counter)  # cause -> plans
    last_plan: PlanStats | None = None
    plan_seconds: Any = field(default_factory=Counter)  # outcome -> host seconds
    mismatches: int = 0
    failed_dumps: int = 0
    _told: set = field(default_factory=set)

    def fallback(self, name: str, reason: str) -> None:
        """Name the backend that runs stock steps, and why it is this one."""
        if self.exporter is not None:
            self.exporter.fallback(name, reason)

    def step(self, decision: Decision, kv_tokens: KvTokens) -> None:
        self.steps[decision] += 1
        for kind, tokens in zip(KvTokens._fields, kv_tokens, strict=True):
            self.kv_tokens[kind] += tokens
        if self.exporter is not None:
            self.exporter.step(decision, kv_tokens)
        if self.decode_log is not None:
            self.decode_log.step(decision, self)

    def extend(self, decision: Decision) -> None:
        """Count an extend or verify batch, where they may run a plan."""
        self.extends[decision] += 1
        self._export("extends_total", 1, decision.variant, decision.reason)

    def draft(self, decision: Decision) -> None:
        """Count a round of draft steps, where they may run a plan."""
        self.drafts[decision] += 1
        self._export("drafts_total", 1, decision.variant, decision.reason)

    @contextmanager
    def evaluation(self, success: str = PLANNED) -> Iterator[None]:
        """Time the evaluation of a batch, by how it ended: with `success` or FAILED."""
        outcome, start = FAILED, time.perf_counter()
        try:
            yield
            outcome = success
        finally:
            seconds = time.perf_counter() - start
            self.plan_seconds[outcome] += seconds
            self._export("plan_seconds_total", seconds, outcome)

    def plan(self, cause: str, stats: PlanStats) -> None:
        self.plans[cause] += 1
        self.last_plan = stats
        self._export("plans_total", 1, cause)
        self._export("plan_tiles_total", stats.num_tiles)
        self._export("plan_work_items_total", stats.num_items)

    def mismatch(self) -> None:
        self.mismatches += 1
        self._export("check_mismatches_total", 1)

    def dump_failed(self, error: Exception) -> None:
        """Count a decision that could not be written (PREFIX_ATTN_DUMP)."""
        self.failed_dumps += 1
        self._export("dumps_failed_total", 1)
        self.log_once("dump", logging.WARNING, "PREFIX_ATTN_DUMP cannot be written: %r", error)

    def log_once(self, reason: str, level: int, message: str, *args, exc_info=None) -> None:
        """Log the first occurrence of a reason; the counters tell how often it came again."""
        if reason not in self._told:
            self._told.add(reason)
            logger.log(level, message, *args, exc_info=exc_info)

    def _export(self, name: str, amount: float, *labels: str) -> None:
        if self.exporter is not None:
            self.exporter.add(name, amount, *labels)
