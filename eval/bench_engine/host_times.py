"""SGLang plugin of the benchmark: times our host code in the scheduler process.

Loaded into the engine only by eval.engine_process. Writes steps by decision, the host time of
steady prefix steps (no new plan) and what the prefix graphs took to $EVAL_HOST_TIMES.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from pathlib import Path

ENV = "EVAL_HOST_TIMES"
_WRITE_EVERY = 16  # steps; the engine is ended without notice
_WINDOW = 1024  # latest steady steps that count: those of the current workload


def register() -> None:
    target = os.environ.get(ENV)
    if not target:
        return
    from sgl_prefix_attn.stepstate import StepPreparer
    from sgl_prefix_attn.variants import GraphVariants

    prepare, log_cost = StepPreparer.prepare, GraphVariants.log_cost
    steps: Counter = Counter()
    steady: list[float] = []
    graphs: dict = {}

    def noted(self):
        graphs.update(vars(self.cost))
        log_cost(self)

    def timed(self, *args, **kwargs):
        start = time.perf_counter()
        step = prepare(self, *args, **kwargs)
        seconds = time.perf_counter() - start
        steps[f"{step.decision.variant}:{step.decision.reason}"] += 1
        if step.is_prefix and step.new_plan is None:
            steady.append(seconds)
        if steps.total() % _WRITE_EVERY == 0:
            _write(Path(target), self.counters, steps, steady, graphs)
        return step

    StepPreparer.prepare, GraphVariants.log_cost = timed, noted


def _write(target: Path, counters, steps: Counter, steady: list[float], graphs: dict) -> None:
    part = target.with_suffix(".part")
    part.write_text(
        json.dumps(
            {
                "steps": dict(steps),
                "plans": dict(counters.plans),
                "graphs": graphs,
                "plan_ms_mean": 1e3 * counters.plan_seconds / max(1, sum(counters.plans.values())),
                "steady_us": 1e6 * statistics.median(steady[-_WINDOW:]) if steady else None,
            }
        )
    )
    part.replace(target)
    del steady[:-_WINDOW]


def read(target: Path, before: dict | None = None) -> dict:
    """What the plugin wrote so far, its counts less those of an earlier read; {} without a step."""
    if not target.exists():
        return {}
    now = json.loads(target.read_text())
    for name in ("steps", "plans"):
        counts = Counter(now[name])
        counts.subtract((before or {}).get(name, {}))
        now[name] = {key: count for key, count in counts.items() if count}
    return now
