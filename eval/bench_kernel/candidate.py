"""One provider on one case: prepared, planned again, captured, timed, and judged after each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.oracle import Oracle
from eval.bench_kernel.providers.provider import Provider
from sgl_prefix_attn.calibrate.timing import LayerTimer

_PLANS = 21


class Candidate:
    """A provider ready to be timed; it keeps its buffers and its captured graph.

    Raises Wrong as soon as the output of any layer is wrong, Unsupported, and whatever a
    third-party kernel raises. Outputs hold NaN before each run that is judged.

    error, error_torch  the largest of all layers so far, and low-precision torch's
    plan_us             microseconds of host time that planning one batch takes
    timing              "graph" (replay) or "eager" (launched one by one)
    """

    def __init__(self, provider: Provider, case: Case, oracle: Oracle):
        self._oracle = oracle
        self.error_torch = oracle.error_torch
        runnable = provider.prepare(case)
        _poison_allocator(case)
        outs = [runnable.run(layer) for layer in range(case.num_layers)]
        self.error = oracle.judge(outs, "first run")
        # Plans are timed before the capture: the graph is then of the state that they left.
        self.plan_us = plan_us(runnable.plan, case.device)
        _poison(outs)
        outs = [runnable.run(layer) for layer in range(case.num_layers)]
        self._accept(outs, "planned again")
        _poison(outs)
        self._timer = LayerTimer(runnable.run, case.num_layers, case.device, provider.capturable)
        self.timing = self._timer.kind
        self.judge_replay("captured")

    def us(self) -> float:
        """Time one round: median microseconds per layer."""
        return self._timer.us()

    def judge_replay(self, when: str) -> None:
        """Replay what is timed and judge every layer. Raises Wrong."""
        _poison(self._timer.outs)
        self._timer.replay()
        self._accept(self._timer.outs, when)

    def _accept(self, outs: list[torch.Tensor], when: str) -> None:
        self.error = max(self.error, self._oracle.judge(outs, when))


def plan_us(plan: Callable[[], None], device: torch.device) -> float:
    """Return the median of host microseconds until one plan() returns; the device is idle."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        plan()
        return (time.perf_counter() - start) * 1e6

    plan()
    return statistics.median(once() for _ in range(_PLANS))


def _poison(outs: list[torch.Tensor]) -> None:
    for out in outs:
        out.fill_(float("nan"))


def _poison_allocator(case: Case) -> None:
    """Leave NaN in freed memory of the output's size: providers that allocate their own output
    get poisoned memory from torch's allocator."""
    _poison([torch.empty_like(case.q) for _ in range(case.num_layers)])
