"""A trace file -> a trace, line by line: what cannot be used is counted, and no reason to stop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sgl_prefix_attn.analyze import sglang_log, trace_lines
from sgl_prefix_attn.analyze.trace import Trace, TraceBuilder

SHOWN = 5  # bad lines that are told with their number and what is wrong with them


@dataclass(frozen=True)
class Reading:
    """bad: lines that cannot be used, problems: (line number, why) of the first; cut: prompts of
    which the log has only the beginning."""

    trace: Trace
    bad: int
    problems: tuple[tuple[int, str], ...]
    cut: int


def read(lines: Iterable[bytes], words: bool = False) -> Reading:
    """Read a trace. In a log of SGLang's, lines about anything else are passed over; so are empty
    ones.

    words  of text, each word is a token, not four characters

    Raises ValueError where no line is a request, with what is wrong with the first.
    """
    builder = TraceBuilder()
    bad, cut = 0, 0
    problems: list[tuple[int, str]] = []
    is_log = False
    for number, line in enumerate(lines, 1):
        if not is_log and builder.is_empty and sglang_log.is_log_line(line):
            is_log, bad, problems = True, 0, []  # what stood before is none of the log's lines
        if line.isspace() or (is_log and not sglang_log.is_finished(line)):
            continue
        try:
            request = trace_lines.parse(line, words)
            builder.add(request)
            cut += request.is_cut
        except ValueError as error:
            bad += 1
            if len(problems) < SHOWN:
                problems.append((number, str(error)))
    try:
        trace = builder.finish()
    except ValueError as error:
        first = f"; line {problems[0][0]}: {problems[0][1]}" if problems else ""
        raise ValueError(f"{error}{first}") from None
    return Reading(trace, bad, tuple(problems), cut)
