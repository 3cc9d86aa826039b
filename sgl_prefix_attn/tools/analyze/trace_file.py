"""A trace file -> a trace, line by line: what cannot be used is counted, and no reason to stop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sgl_prefix_attn.tools.analyze import sglang_log, trace_lines
from sgl_prefix_attn.tools.analyze.containers import unpacked
from sgl_prefix_attn.tools.analyze.trace import Trace, TraceBuilder
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
    builder = TraceBuilder()
    bad, cut = 0, 0
    problems: list[tuple[int, str]] = []
    is_log = False
    for number, line in enumerate(unpacked(lines), 1):
        if isinstance(line, bytes):
            if not is_log and builder.is_empty and sglang_log.is_log_line(line):
                is_log, bad, problems = True, 0, []  # what stood before is none of the log's lines
            if line.isspace() or (is_log and not sglang_log.is_finished(line)):
                continue
        try:
            request = trace_lines.parse(line, options)
            builder.add(request)
            cut += request.is_cut
        except ValueError as error:
            bad += 1
            if len(problems) < SHOWN:
                problems.append((number, str(error)))
    if builder.is_empty and is_log and not bad:
        raise ValueError(
            "no request has finished in this log of SGLang's: start the server with "
            "--log-requests --log-requests-level 3"
        )
    try:
        trace, notes = builder.finish()
    except ValueError as error:
        first = f"; line {problems[0][0]}: {problems[0][1]}" if problems else ""
        raise ValueError(f"{error}{first}") from None
    if cut:
        notes.append(
            f"{cut:,} prompts are logged in part: more may be shared than is said here "
            "(--log-requests-level 3 logs all)"
        )
    return Reading(trace, bad, tuple(problems), tuple(notes))
