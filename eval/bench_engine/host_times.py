"""Host times of the benchmark: times our host code in the scheduler process, as a plugin does.

Loaded into the engine only by eval.engine_process. Writes steps by decision, the host time of
steady prefix steps (from SGLang's hand-over of the batch to the decision; no new plan) to
$EVAL_HOST_TIMES.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ENV = "EVAL_HOST_TIMES"
_WRITE_EVERY = 16  # steps; the engine is ended without notice
_WINDOW = 256  # latest steady steps that are kept ...
_ENOUGH = 32  # ... and of how many at least a time is told


class HostTimes:
    """What is known so far; one per process."""

    def __init__(self, target: Path):
        self._target = target
        self._steps: Counter = Counter()
        self._steady_steps = 0
        self._steady: deque[float] = deque(maxlen=_WINDOW)
        self.prepared = None  # the step that the backend prepared last
        # A busy disk would stop the scheduler. The thread starts with the first text, behind forks.
        self._writer = ThreadPoolExecutor(1)

    def observed(self, seconds: float, counters) -> None:
        """Note that the backend was handed a batch and took so long."""
        step, self.prepared = self.prepared, None
        if step is None:  # the batch does not decode
            return
        self._steps[f"{step.decision.variant}:{step.decision.reason}"] += 1
        if step.is_prefix and step.new_plan is None:
            self._steady_steps += 1
            self._steady.append(round(1e6 * seconds, 1))
        if self._steps.total() % _WRITE_EVERY == 0:
            self._write(counters)

    def _write(self, counters) -> None:
        plans = sum(counters.plans.values())
        known = {
            "steps": dict(self._steps), "plans": dict(counters.plans),
            "plan_ms_mean": 1e3 * counters.plan_seconds["planned"] / max(1, plans),
            "steady_steps": self._steady_steps, "steady": list(self._steady),
        }  # fmt: skip
        self._writer.submit(self._replace, json.dumps(known))

    def _replace(self, text: str) -> None:
        part = self._target.with_suffix(".part")
        part.write_text(text)
        part.replace(self._target)


def register() -> None:
    from sgl_prefix_attn.step.preparer import StepPreparer

    times = HostTimes(Path(os.environ[ENV]))
    start_preparer, prepare = StepPreparer.__init__, StepPreparer.prepare

    def watching_the_backend(self, *args, **kwargs):
        # Not when SGLang loads its plugins: the backend imports much of SGLang.
        from sgl_prefix_attn.engine.backend import PrefixAttnBackend

        observe = PrefixAttnBackend.observe

        def timed(backend, *args, **kwargs):
            start = time.perf_counter()
            observe(backend, *args, **kwargs)
            times.observed(time.perf_counter() - start, backend.counters)

        StepPreparer.__init__, PrefixAttnBackend.observe = start_preparer, timed
        start_preparer(self, *args, **kwargs)

    def noting_the_step(self, *args, **kwargs):
        times.prepared = prepare(self, *args, **kwargs)
        return times.prepared

    StepPreparer.__init__, StepPreparer.prepare = watching_the_backend, noting_the_step


def read(target: Path, before: dict | None = None) -> dict:
    """Read what the plugin wrote so far, less the counts of an earlier read; {} without a step.

    steady_us     median of the latest steady steps since the earlier read, None of too few
    plan_ms_mean  of all plans, those before the earlier read among them
    """
    if not target.exists():
        return {}
    now, before = json.loads(target.read_text()), before or {}
    for name in ("steps", "plans"):
        counts = Counter(now[name])
        counts.subtract(before.get(name, {}))
        now[name] = {key: count for key, count in counts.items() if count}
    latest, count = now.pop("steady"), now["steady_steps"] - before.get("steady_steps", 0)
    us = statistics.median(latest[-count:]) if count >= _ENOUGH else None
    return now | {"steady_steps": count, "steady_us": us}
