"""Providers of one comparison: each prepared and judged, timed in turn, and judged again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from eval.bench_kernel.case import Case
from eval.bench_kernel.oracle import Oracle, Wrong
from eval.bench_kernel.providers.provider import Provider, Runnable, Unsupported
from sgl_prefix_attn.tools.calibrate.timing import LayerTimer

ROUNDS = 3
_PLANS = 21


class Candidate:
    """A provider ready to be timed; it keeps its buffers and its captured graph.

    Raises Wrong as soon as the output of any layer is wrong, Unsupported, and whatever a
    third-party kernel raises. Outputs hold NaN before each run that is judged.

    measured  of a row: plan_us, microseconds of host time that planning one batch takes; error,
              ||out - truth|| / ||truth|| of the worst layer; error_torch, low-precision torch's;
              timing, "graph" (replay) or "eager" (launched one by one); what else the provider says
    """

    def __init__(
        self, provider: Provider, case: Case, oracle: Oracle, timer: type[LayerTimer] = LayerTimer
    ):
        self._oracle = oracle
        self.runnable = runnable = provider.prepare(case)
        # Providers that allocate their own output get poisoned memory from torch's allocator.
        _poison([torch.empty_like(case.q) for _ in range(case.num_layers)])
        outs = [runnable.run(layer) for layer in range(case.num_layers)]
        self.measured: dict = {"error": 0.0, "error_torch": oracle.error_torch}
        self._judge(outs, "first run")
        # Plans are timed before the capture: the graph is then of the state that they left.
        self.measured["plan_us"] = _plan_us(runnable.plan, case.device)
        _poison(outs)
        self._judge([runnable.run(layer) for layer in range(case.num_layers)], "planned again")
        _poison(outs)
        self._timer = timer(runnable.run, case.num_layers, case.device, provider.capturable)
        self.measured |= {"timing": self._timer.kind} | runnable.facts
        self.judge_replay("captured")

    def us(self) -> float:
        """Time one round: median microseconds per layer."""
        return self._timer.us()

    def judge_replay(self, when: str) -> None:
        """Replay what is timed and judge every layer. Raises Wrong."""
        _poison(self._timer.outs)
        self._timer.replay()
        self._judge(self._timer.outs, when)

    def _judge(self, outs: list[torch.Tensor], when: str) -> None:
        self.measured["error"] = max(self.measured["error"], self._oracle.judge(outs, when))


def _plan_us(plan: Callable[[], None], device: torch.device) -> float:
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


@dataclass
class Entry:
    """A provider in a comparison and its row of the result file; `candidate` only while there is
    something left to do with it."""

    provider: Provider
    row: dict
    candidate: Candidate | None = None
    us_rounds: list[float] = field(default_factory=list)

    def end(self, status: str, **measured) -> None:
        self.row |= {"status": status, **measured}
        self.candidate = None


def take_turns(
    providers: Iterable[Provider], known: Callable[[Provider], dict],
    case_of: Callable[[Provider], tuple[Case, Oracle]], device: torch.device,
    facts: Callable[[Runnable], dict] = lambda runnable: {},
    timer: type[LayerTimer] = LayerTimer,
) -> list[dict]:  # fmt: skip
    """Prepare and judge all providers, time them round by round, judge what was timed. Returns
    their rows: what is `known` before the run, then the status, "ok" or "wrong", "unavailable",
    "unsupported", "failed" followed by the reason. Only where it is "ok" a row gets us,
    microseconds per layer, the median over the rounds, us_rounds, each round's median, what the
    candidate measured, and `facts` of what was timed. A `timer` is made of each.

    Candidates live only as long as this call: they are gigabytes.
    """

    def prepare(entry: Entry) -> None:
        entry.candidate = Candidate(entry.provider, *case_of(entry.provider), timer)

    def time_round(entry: Entry) -> None:
        entry.us_rounds.append(entry.candidate.us())

    def finish(entry: Entry) -> None:
        candidate = entry.candidate
        candidate.judge_replay("timed")
        times = {"us": statistics.median(entry.us_rounds), "us_rounds": entry.us_rounds}
        entry.end("ok", **times | candidate.measured | facts(candidate.runnable))

    entries = []
    for provider in providers:
        reason = provider.available()
        status = f"unavailable: {reason}" if reason else "ok"
        entries.append(Entry(provider, known(provider) | {"status": status}))
    # Every other round is in the reverse order.
    rounds = [(time_round, entries[:: (-1) ** i]) for i in range(ROUNDS)]
    for step, order in [(prepare, entries), *rounds, (finish, entries)]:
        for entry in order:
            if entry.row["status"] == "ok":
                _attempt(step, entry, device)
    return [entry.row for entry in entries]


def _attempt(step: Callable[[Entry], None], entry: Entry, device: torch.device) -> None:
    """Run a step of one entry; whatever goes wrong is its status, and ends it alone. Where it broke
    the CUDA context, the steps of all others fail, too."""
    try:
        step(entry)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Wrong as wrong:
        entry.end(f"wrong: {wrong}", error=wrong.error, error_torch=wrong.error_torch)
    except Unsupported as reason:
        entry.end(f"unsupported: {reason}")
    except Exception as error:  # whatever a third-party kernel raises is a line of the table
        entry.end(f"failed: {type(error).__name__}: {str(error)[:200]}")
