"""A trace file -> a trace, line by line: what cannot be used is counted, and no reason to stop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sgl_prefix_attn.tools.analyze import sglang_log, trace_lines
from sgl_prefix_attn.tools.analyze.containers import unpacked
from sgl_prefix_attn.tools.analyze.text_lengths import MEASURED, measured, per_token
from sgl_prefix_attn.tools.analyze.trace import Request, Trace, TraceBuilder
from sgl_prefix_attn.tools.analyze.trace_lines import DEFAULTS, Options

SHOWN = 5  # bad lines that are told with their number and what is wrong with them


class Reading(NamedTuple):
    """bad: lines that cannot be used, problems: (line number, why) of the first; notes: what else
    there is to know about the trace."""

    trace: Trace
    bad: int
    problems: tuple[tuple[int, str], ...]
    notes: tuple[str, ...]


def read(lines: Iterable[bytes], options: Options = DEFAULTS) -> Reading:
    """Read a trace. In a log of SGLang's, lines about anything else are passed over; so are empty
    ones.

    Raises ValueError where no line is a request, with what is wrong with the first.
    """
    taken = _Taken()
    is_log = False
    for number, line in enumerate(unpacked(lines), 1):
        if isinstance(line, bytes):
            if not is_log and taken.is_empty and sglang_log.is_log_line(line):
                is_log, taken = True, _Taken()  # what stood before is none of the log's lines
            if line.isspace() or (is_log and not sglang_log.is_finished(line)):
                continue
            if sglang_log.is_other_event(line):
                continue
        try:
            taken.add(number, trace_lines.parse(line, options))
        except ValueError as error:
            taken.refuse(number, error)
    if taken.is_empty and is_log and not taken.bad:
        raise ValueError(
            "no request has finished in this log of SGLang's: start the server with "
            "--log-requests --log-requests-level 3"
        )
    return taken.finish("words" if options.words else "characters")


class _Taken:
    """What a file's lines were: requests, the first of which wait until they tell how long texts
    are (text_lengths.py), and lines that cannot be used."""

    def __init__(self):
        self._builder = TraceBuilder()
        self._waiting: list[tuple[int, Request]] = []
        self._ratio: float | None = None
        self._problems: list[tuple[int, str]] = []
        self._cut = self.bad = 0

    @property
    def is_empty(self) -> bool:
        return not self._waiting and self._builder.is_empty

    def add(self, number: int, request: Request) -> None:
        self._waiting.append((number, request))
        if self._ratio is not None or len(self._waiting) == MEASURED:
            self._build()

    def refuse(self, number: int, error: ValueError) -> None:
        self.bad += 1
        if len(self._problems) < SHOWN:
            self._problems.append((number, str(error)))

    def finish(self, of_text: str) -> Reading:
        self._build()
        try:
            trace, notes = self._builder.finish()
        except ValueError as error:
            line, why = next(iter(self._problems), (0, ""))
            raise ValueError(f"{error}; line {line}: {why}" if line else str(error)) from None
        if self._ratio is not None:
            notes.append(f"{self._ratio:.2f} {of_text} of text for a token, as the log counts them")
        if self._cut:
            notes.append(
                f"{self._cut:,} prompts are logged in part: more may be shared than is said here "
                "(--log-requests-level 3 logs all)"
            )
        return Reading(trace, self.bad, tuple(sorted(self._problems)), tuple(notes))

    def _build(self) -> None:
        if self._ratio is None:
            self._ratio = per_token(request for _, request in self._waiting)
        for number, request in self._waiting:
            try:
                self._builder.add(measured(request, self._ratio))
                self._cut += request.is_cut
            except ValueError as error:
                self.refuse(number, error)
        self._waiting.clear()
