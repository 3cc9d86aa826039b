"""A server's counters, as /metrics says them; pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

STEPS = "sglang:prefix_attn_steps_total"
KV_TOKENS = "sglang:prefix_attn_kv_tokens_total"

Counters = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse_metrics(text: str) -> Counters:
    """Return samples of the Prometheus text format as {(name, sorted labels): value}."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def growth(before: Counters, after: Counters) -> Counters:
    """Return what each sample grew by; one that was not there before began at 0."""
    return {key: value - before.get(key, 0) for key, value in after.items()}


def by_labels(counters: Counters, name: str, *labels: str) -> dict[str, float]:
    """Add up the samples of a metric that are not 0, by the values of labels joined by a colon."""
    sums: dict[str, float] = defaultdict(float)
    for (found, of), value in counters.items():
        if found == name and value:
            sums[":".join(dict(of)[label] for label in labels)] += value
    return dict(sums)


def total(counters: Counters, name: str, **labels: str) -> float:
    """Add up the samples of a metric that have these labels."""
    return sum(
        value
        for (found, of), value in counters.items()
        if found == name and labels.items() <= dict(of).items()
    )


def prefix_share(steps: Mapping[str, float]) -> float | None:
    """Return the share of steps, by "variant:reason", that ran a plan; None without a step."""
    ours = sum(count for name, count in steps.items() if name.startswith("prefix:"))
    return ours / sum(steps.values()) if steps else None
