"""SGLang plugin of the benchmark: times our host code in the scheduler process.

Loaded into the engine only by eval.engine_process. Writes steps by decision, the host time of
steady prefix steps (from SGLang's hand-over of the batch to the decision; no new plan) and what the
prefix graphs took to $EVAL_HOST_TIMES.
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

    start_preparer, prepare = StepPreparer.__init__, StepPreparer.prepare
    log_cost = GraphVariants.log_cost
    prepared: list = []
    steps: Counter = Counter()
    steady: list[float] = []
    graphs: dict = {}

    def noting_the_step(self, *args, **kwargs):
        prepared[:] = [prepare(self, *args, **kwargs)]
        return prepared[0]

    def timed(observe):
        def observing(self, *args, **kwargs):
            prepared.clear()
            start = time.perf_counter()
            observe(self, *args, **kwargs)
            seconds = time.perf_counter() - start
            for step in prepared:  # none where the batch does not decode
                steps[f"{step.decision.variant}:{step.decision.reason}"] += 1
                if step.is_prefix and step.new_plan is None:
                    steady.append(seconds)
                if steps.total() % _WRITE_EVERY == 0:
                    _write(Path(target), self.counters, steps, steady, graphs)

        return observing

    def noting_the_cost(self):
        graphs.update(vars(self.cost))
        log_cost(self)

    def watching_the_backend(self, *args, **kwargs):
        # Not when SGLang loads its plugins: the backend imports much of SGLang.
        from sgl_prefix_attn.backend import PrefixAttnBackend

        PrefixAttnBackend.observe = timed(PrefixAttnBackend.observe)
        start_preparer(self, *args, **kwargs)

    StepPreparer.__init__, StepPreparer.prepare = watching_the_backend, noting_the_step
    GraphVariants.log_cost = noting_the_cost


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
