"""Wall-clock time of decode steps, as far as the host can tell it without asking the GPU.

A step's start is the moment when it is prepared on the host. Under load SGLang's loop goes round
once per step: from one start to the next it waits for the GPU to finish a step, the one just
launched, or with overlap scheduling the one before. Such an interval is a step's time, host work
and all, if nothing but decode steps of one variant ran in it and just before it.
"""

import time
from collections.abc import Callable, Sequence

# A longer gap is no step: SGLang was paused in place, which keeps the running requests. Nothing
# tells a shorter pause from a slow step.
_PAUSE_S = 1.0


class StepIntervals:
    """Use per decode step: start(), then ran(); interrupt() for whatever else ran."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._started = 0.0
        self._first = None
        self._variant = ""  # of the step before, of none at first
        self._run = 0  # steps of the variant without anything in between

    def start(self, reqs: Sequence) -> tuple[str, float] | None:
        """Return (variant, seconds) since the step before started; None: no step's time."""
        now = self._clock()
        # SGLang keeps the order of running requests and appends new ones, so the server was not
        # idle meanwhile if the first request is still the same. The reference keeps it alive.
        if self._first is not reqs[0] or now - self._started > _PAUSE_S:
            self._first, self._run = reqs[0], 0
        known = (self._variant, now - self._started) if self._run >= 2 else None
        self._started = now
        return known

    def ran(self, variant: str) -> None:
        """Note that the step that started runs this variant."""
        self._run = self._run + 1 if variant == self._variant else 1
        self._variant = variant

    def interrupt(self) -> None:
        """Note that something else than a usual decode step ran, or will run as this one."""
        self._first = None
