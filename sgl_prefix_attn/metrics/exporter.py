"""The counters on SGLang's /metrics.

SGLang runs prometheus_client in multiprocess mode: the directory is set in the environment before
the scheduler starts, and prometheus_client must not be imported before that. So it is imported
when an exporter is built (in the backend's constructor), never with this module.
"""

import functools
from collections.abc import Mapping

from sgl_prefix_attn.metrics.counters import KvSize, KvTokens
from sgl_prefix_attn.records import PREFIX, STOCK, Decision

# Name (behind sglang:prefix_attn_), text, labels besides those that say whose it is.
_COUNTERS = (
    ("steps_total", "Decode steps by kernel variant and the reason for it.", "variant", "reason"),
    (
        "extends_total",
        "Extend and verify batches by kernel variant and reason, where they may run plans.",
        "variant",
        "reason",
    ),
    (
        "drafts_total",
        "Rounds of a draft model's decode steps by kernel variant and reason, where they may run "
        "plans.",
        "variant",
        "reason",
    ),
    (
        "kv_tokens_total",
        "KV tokens per layer of decode steps: read, what a query-centric kernel reads, unique "
        "(of steps whose radix tree was read).",
        "kind",
    ),
    (
        "kv_bytes_total",
        "The same in bytes of K and V over the layers that may run plans (all where none may) of "
        "tensor-parallel rank 0.",
        "kind",
    ),
    (
        "predicted_attention_seconds_total",
        "Predicted seconds of attention in the layers that may run plans, of steps chosen by "
        "predicted times.",
        "variant",
    ),
    ("plans_total", "Plans made, by what made the one before invalid.", "cause"),
    (
        "plan_seconds_total",
        "Host seconds of reading the tree, predicting and planning, by how that ended.",
        "outcome",
    ),
    ("plan_tiles_total", "Tiles of requests of the plans made."),
    ("plan_work_items_total", "Work items per KV head and layer of the plans made."),
    (
        "check_mismatches_total",
        "Layers whose prefix and stock outputs differed (PREFIX_ATTN_CHECK=1).",
    ),
    ("dumps_failed_total", "Decisions that could not be written (PREFIX_ATTN_DUMP)."),
)
_INTERVALS = (
    "decode_interval_seconds",
    "Wall-clock time from the start of a decode step on the host to that of the next, "
    "with no other forward pass, pause of a second or change of variant in or just before it.",
    "variant",
)
_SAVED_SHARE = (
    "kv_saved_share",
    "Share of the KV bytes of a query-centric kernel that decode steps did not read, 0 to 1, over "
    "the last --decode-log-interval of them.",
)
_FALLBACK = (
    "fallback_info",
    "Always 1: which of SGLang's backends runs stock decode steps, and why this one.",
    "backend",
    "reason",
)


@functools.cache
def _metrics(registry, whose: tuple[str, ...]) -> dict:
    """Make the metrics of one registry, by name: all backends of a process share them."""
    from prometheus_client import REGISTRY, Counter, Gauge, Summary

    latest = functools.partial(Gauge, multiprocess_mode="mostrecent")
    made = {}
    kinds = ((Counter, _COUNTERS), (Summary, (_INTERVALS,)), (latest, (_SAVED_SHARE, _FALLBACK)))
    for kind, rows in kinds:
        for name, text, *labels in rows:
            full_name = f"sglang:prefix_attn_{name}"
            made[name] = kind(full_name, text, (*whose, *labels), registry=registry or REGISTRY)
    return made


class PrometheusExporter:
    """One backend's counters as prometheus metrics (an increment is about a microsecond).

    registry  None: prometheus_client's own, which is SGLang's
    labels    that say whose they are, as SGLang's own metrics do: model, ranks ...
    """

    def __init__(self, size: KvSize, registry=None, labels: Mapping[str, object] | None = None):
        whose = labels or {}
        self._whose = tuple(whose.values())
        self._metrics = _metrics(registry, tuple(whose))
        self._size = size
        self._child = functools.cache(self._labelled)
        self.saved_share = self._child("kv_saved_share").set
        # These are there with 0 from the start, as those without a label.
        for variant in (PREFIX, STOCK):
            self.add("predicted_attention_seconds_total", 0, variant)
            self._child("decode_interval_seconds", variant)
        for name, _, *own in _COUNTERS:
            if not own:
                self.add(name, 0)
        self._add_kv(KvTokens(0, 0, 0))

    def _labelled(self, name: str, *labels: str):
        metric, values = self._metrics[name], (*self._whose, *labels)
        return metric.labels(*values) if values else metric

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Increment the counter of that name."""
        self._child(name, *labels).inc(amount)

    def fallback(self, name: str, reason: str) -> None:
        """Name the backend that runs stock steps."""
        self._child("fallback_info", name, reason).set(1)

    def step(self, decision: Decision, kv_tokens: KvTokens) -> None:
        self.add("steps_total", 1, decision.variant, decision.reason)
        self._add_kv(kv_tokens)
        if (times := decision.predicted) is not None:
            us = times.prefix_us if decision.variant == PREFIX else times.stock_us
            seconds = us * 1e-6 * self._size.num_layers
            self.add("predicted_attention_seconds_total", seconds, decision.variant)

    def interval(self, variant: str, seconds: float) -> None:
        """Count the wall-clock time between the starts of two decode steps (StepIntervals)."""
        self._child("decode_interval_seconds", variant).observe(seconds)

    def _add_kv(self, kv_tokens: KvTokens) -> None:
        for kind, tokens in zip(KvTokens._fields, kv_tokens, strict=True):
            self.add("kv_tokens_total", tokens, kind)
            self.add("kv_bytes_total", tokens * self._size.token_bytes, kind)
