"""The counters on SGLang's /metrics.

SGLang runs prometheus_client in multiprocess mode: the directory is set in the environment before
the scheduler starts, and prometheus_client must not be imported before that. So it is imported
when an exporter is built (in the backend's constructor), never with this module.
"""

from __future__ import annotations

import functools

from sgl_prefix_attn.metrics.counters import KV_KINDS, KvSize, KvTokens
from sgl_prefix_attn.records import PREFIX, STOCK, Decision, PlanStats


class _Metrics:
    """The metrics of one registry: all backends of a process share them."""

    def __init__(self, registry):
        from prometheus_client import REGISTRY, Counter, Summary

        def make(kind, name: str, text: str, *labels: str):
            registered = REGISTRY if registry is None else registry
            return kind(f"sglang:prefix_attn_{name}", text, labels, registry=registered)

        self.steps = make(
            Counter,
            "steps_total",
            "Decode steps by kernel variant and the reason for it.",
            "variant",
            "reason",
        )
        self.kv_tokens = make(
            Counter,
            "kv_tokens_total",
            "KV tokens per layer of decode steps: read, what a query-centric kernel reads, unique "
            "(of steps whose radix tree was read).",
            "kind",
        )
        self.kv_bytes = make(
            Counter,
            "kv_bytes_total",
            "The same in bytes of K and V over all layers of tensor-parallel rank 0.",
            "kind",
        )
        self.predicted = make(
            Counter,
            "predicted_attention_seconds_total",
            "Predicted seconds of attention over all layers, of steps chosen by predicted times.",
            "variant",
        )
        self.intervals = make(
            Summary,
            "decode_interval_seconds",
            "Wall-clock time from the start of a decode step on the host to that of the next, "
            "with no other forward pass or change of variant in or just before it.",
            "variant",
        )
        self.plans = make(
            Counter, "plans_total", "Plans made, by what made the one before invalid.", "cause"
        )
        self.plan_seconds = make(
            Counter,
            "plan_seconds_total",
            "Host seconds of reading the tree, predicting and planning, by how that ended.",
            "outcome",
        )
        self.plan_packs = make(Counter, "plan_packs_total", "Packs of the plans made.")
        self.plan_items = make(
            Counter, "plan_work_items_total", "Work items per KV head and layer of the plans made."
        )
        self.mismatches = make(
            Counter,
            "check_mismatches_total",
            "Layers whose prefix and stock outputs differed (SGL_PREFIX_ATTN_CHECK=1).",
        )


_metrics = functools.cache(_Metrics)


class PrometheusExporter:
    """One backend's counters as prometheus metrics (an increment is about a microsecond).

    registry None: prometheus_client's own, which is SGLang's.
    """

    def __init__(self, size: KvSize, registry=None):
        self._metrics = metrics = _metrics(registry)
        self._token_bytes = size.token_bytes
        self._seconds_per_us = size.num_layers * 1e-6
        self._kv = [
            (metrics.kv_tokens.labels(kind=kind).inc, metrics.kv_bytes.labels(kind=kind).inc)
            for kind in KV_KINDS
        ]
        variants = (PREFIX, STOCK)
        self._predicted = {v: metrics.predicted.labels(variant=v).inc for v in variants}
        self._interval = {v: metrics.intervals.labels(variant=v).observe for v in variants}
        self._steps: dict = {}  # Decision -> inc of its label

    def step(self, decision: Decision, kv_tokens: KvTokens, steps: int = 1) -> None:
        inc = self._steps.get(decision)
        if inc is None:
            labels = self._metrics.steps.labels(variant=decision.variant, reason=decision.reason)
            inc = self._steps[decision] = labels.inc
        inc(steps)
        for (inc_tokens, inc_bytes), tokens in zip(self._kv, kv_tokens, strict=True):
            inc_tokens(tokens)
            inc_bytes(tokens * self._token_bytes)
        predicted = decision.predicted
        if predicted is not None:
            us = predicted.prefix_us if decision.variant == PREFIX else predicted.stock_us
            self._predicted[decision.variant](us * self._seconds_per_us * steps)

    def interval(self, variant: str, seconds: float) -> None:
        self._interval[variant](seconds)

    def planned(self, outcome: str, seconds: float) -> None:
        self._metrics.plan_seconds.labels(outcome=outcome).inc(seconds)

    def plan(self, cause: str, stats: PlanStats) -> None:
        self._metrics.plans.labels(cause=cause).inc()
        self._metrics.plan_packs.inc(stats.num_packs)
        self._metrics.plan_items.inc(stats.num_items)

    def mismatch(self) -> None:
        self._metrics.mismatches.inc()
