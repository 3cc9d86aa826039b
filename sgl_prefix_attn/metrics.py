"""What the decode steps did: counters in the scheduler process, exported to SGLang's /metrics.

SGLang runs prometheus_client in multiprocess mode: the directory is set in the environment before
the scheduler starts, and prometheus_client must not be imported before that. So it is imported
when an exporter is built (in the backend's constructor), never with this module.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from sgl_prefix_attn.records import Decision

logger = logging.getLogger(__name__)

KV_KINDS = ("read", "query_centric", "unique")


class KvTokens(NamedTuple):
    """KV tokens of one layer in one step: loaded, loaded by one-request-a-row kernels, distinct.

    unique is 0 for a step whose tree was not read.
    """

    read: int
    query_centric: int
    unique: int


class PrometheusExporter:
    """The counters as prometheus metrics, cached by label (an increment is about a microsecond)."""

    def __init__(self, registry=None):
        from prometheus_client import REGISTRY, Counter

        registry = REGISTRY if registry is None else registry
        self._steps = Counter(
            "sglang:prefix_attn_steps_total",
            "Decode steps by kernel variant and the reason for it.",
            ["variant", "reason"],
            registry=registry,
        )
        kv_tokens = Counter(
            "sglang:prefix_attn_kv_tokens_total",
            "KV tokens per layer: read, what a query-centric kernel reads, unique (planned steps).",
            ["kind"],
            registry=registry,
        )
        self._kv_tokens = {kind: kv_tokens.labels(kind=kind) for kind in KV_KINDS}
        self._plans = Counter(
            "sglang:prefix_attn_plans_total",
            "Plans made, by what made the one before invalid.",
            ["cause"],
            registry=registry,
        )
        self._plan_seconds = Counter(
            "sglang:prefix_attn_plan_seconds_total",
            "Host seconds spent on planning.",
            registry=registry,
        )
        self._mismatches = Counter(
            "sglang:prefix_attn_check_mismatches_total",
            "Layers whose prefix and stock outputs differed (SGL_PREFIX_ATTN_CHECK=1).",
            registry=registry,
        )
        self._step_labels: dict = {}

    def step(self, decision: Decision, kv_tokens: KvTokens) -> None:
        child = self._step_labels.get(decision)
        if child is None:
            child = self._steps.labels(variant=decision.variant, reason=decision.reason)
            self._step_labels[decision] = child
        child.inc()
        for kind in KV_KINDS:
            self._kv_tokens[kind].inc(getattr(kv_tokens, kind))

    def plan(self, cause: str, seconds: float) -> None:
        self._plans.labels(cause=cause).inc()
        self._plan_seconds.inc(seconds)

    def mismatch(self) -> None:
        self._mismatches.inc()


@functools.cache
def process_exporter() -> PrometheusExporter:
    """The exporter to /metrics: one a process, as SGLang may build several backends in one."""
    return PrometheusExporter()


@dataclass
class StepCounters:
    """Counters of one backend. exporter None: in-process only."""

    exporter: PrometheusExporter | None = None
    steps: Counter = field(default_factory=Counter)  # Decision -> decode steps
    kv_tokens: Counter = field(default_factory=Counter)  # kind -> KV tokens per layer
    plans: Counter = field(default_factory=Counter)  # cause -> plans
    plan_seconds: float = 0.0
    mismatches: int = 0
    _told: set = field(default_factory=set)

    def step(self, decision: Decision, kv_tokens: KvTokens) -> None:
        self.steps[decision] += 1
        for kind in KV_KINDS:
            self.kv_tokens[kind] += getattr(kv_tokens, kind)
        if self.exporter is not None:
            self.exporter.step(decision, kv_tokens)

    def plan(self, cause: str, seconds: float) -> None:
        self.plans[cause] += 1
        self.plan_seconds += seconds
        if self.exporter is not None:
            self.exporter.plan(cause, seconds)

    def mismatch(self) -> None:
        self.mismatches += 1
        if self.exporter is not None:
            self.exporter.mismatch()

    def log_once(self, reason: str, level: int, message: str, *args, exc_info=None) -> None:
        """Log the first occurrence of a reason; the counters tell how often it came again."""
        if reason not in self._told:
            self._told.add(reason)
            logger.log(level, message, *args, exc_info=exc_info)

    def as_dict(self) -> dict:
        """Plain data, for reports."""
        return {
            "steps": [
                {"variant": decision.variant, "reason": decision.reason, "count": count}
                for decision, count in sorted(
                    self.steps.items(), key=lambda item: (item[0].variant, item[0].reason)
                )
            ],
            "kv_tokens": {kind: self.kv_tokens[kind] for kind in KV_KINDS},
            "plans": dict(sorted(self.plans.items())),
            "plan_seconds": self.plan_seconds,
            "mismatches": self.mismatches,
        }
