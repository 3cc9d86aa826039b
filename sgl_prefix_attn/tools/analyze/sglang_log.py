"""SGLang's log of requests (--log-requests), text or JSON: a request for each that has finished.

Such a line has the prompt (from --log-requests-level 2 on, which cuts it to its first and last
1024 tokens or characters; 3 does not), how many tokens it is and how many were generated, and how
long the request took: it came so much before the line was written.

    [2026-11-22 10:00:00] Finish: obj=GenerateReqInput(rid='..', .. text=.., input_ids=.., ..),
        out={.. 'meta_info': {.. 'prompt_tokens': 7, 'completion_tokens': 5, 'e2e_latency': 0.2 ..}}
    [2026-11-22 10:00:00] {"timestamp": .., "event": "request.finished", "obj": {..}, "out": {..}}

What collected the log may have put something before it.
"""

from __future__ import annotations

import ast
import re
from datetime import datetime
from typing import Any, NamedTuple

import orjson

_CUT = 1024  # what level 2 leaves of either end
_STAMP = re.compile(rb"""[^{"]{0,300}?\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] ?""")
_PROBE = re.compile(rb"""rid['"]?[=:] ?['"]HEALTH_CHECK_""")  # SGLang's own /health
_EVENT = re.compile(rb'"event": ?"request\.')
_STRING = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_PROMPT = re.compile(
    rf"[(,] ?text=(?P<text>None|{_STRING})(?P<text_cut> \.\.\. {_STRING})?, "
    r"input_ids=(?P<ids>None|\[[\d, ]*\])(?P<ids_cut> \.\.\. \[)?",
    re.DOTALL,
)
_META = {
    name: re.compile(rf"'{name}': ([\d.e+-]+)")
    for name in ("prompt_tokens", "completion_tokens", "e2e_latency")
}


class Logged(NamedTuple):
    """arrival: seconds since 1970; prompt: token ids or text, as long as `tokens` unless cut."""

    arrival: float
    prompt: list[int] | str
    tokens: int
    output: int
    is_cut: bool


def is_log_line(line: bytes) -> bool:
    """Tell whether a line begins as all that SGLang logs, but for what a collector puts before."""
    return _STAMP.match(line) is not None


def is_finished(line: bytes) -> bool:
    """Tell whether a line is about a request that has finished, and that somebody asked for."""
    head = line[:600]
    is_text = b"Finish: obj=GenerateReqInput(" in head and not head.startswith(b"{")
    return (is_text or b'"request.finished"' in head) and not _PROBE.search(head)


def is_other_event(line: bytes) -> bool:
    """Tell whether a line is JSON about a request that has not finished, or that nobody asked for,
    as it stands without the time before it."""
    return _EVENT.search(line, 0, 600) is not None and not is_finished(line)


def parse(line: bytes) -> Logged | None:
    """Read a line; None where it is not about a finished request. Raises ValueError that says what
    it lacks."""
    if not is_finished(line):
        return None
    stamp = _STAMP.match(line)
    message = line[stamp.end() :] if stamp else line
    if message.startswith(b"{"):
        return _json(message)
    if stamp is None:
        raise ValueError("a finished request without the time at which it was logged")
    return _text(message.decode(errors="replace"), stamp[1].decode())


def _json(message: bytes) -> Logged:
    try:
        row = orjson.loads(message)
        given, meta, at = row["obj"], row["out"]["meta_info"], row["timestamp"]
        ids, text = given.get("input_ids"), given.get("text")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a finished request that cannot be read: {error!r}") from None
    prompt, is_cut = ids or text, False
    if isinstance(ids, list) and "..." in ids[_CUT : _CUT + 1]:
        prompt, is_cut = ids[:_CUT], True
    elif isinstance(prompt, str) and len(prompt) == 2 * _CUT + 3 and prompt[_CUT:][:3] == "...":
        prompt, is_cut = prompt[:_CUT], True
    return _logged(prompt, is_cut, meta, at)


def _text(message: str, at: str) -> Logged:
    asked, _, answer = message.rpartition("'meta_info': {")
    found = _PROMPT.search(asked)
    if found is None:
        raise ValueError("no prompt is logged: that takes --log-requests-level 2, better 3")
    is_ids = found["ids"] != "None"
    cut = found["ids_cut"] if is_ids else found["text_cut"]
    try:
        prompt = ast.literal_eval(found["ids"] if is_ids else found["text"])
    except (SyntaxError, ValueError):
        raise ValueError("a finished request whose prompt cannot be read") from None
    meta = {
        name: float(value[1])
        for name, pattern in _META.items()
        if (value := pattern.search(answer)) is not None
    }
    return _logged(prompt, cut is not None, meta, at)


def _logged(prompt: Any, is_cut: bool, meta: dict[str, Any], at: str) -> Logged:
    if not prompt:
        raise ValueError("no prompt is logged: that takes --log-requests-level 2, better 3")
    try:
        return Logged(
            arrival=datetime.fromisoformat(at).timestamp() - float(meta["e2e_latency"]),
            prompt=prompt,
            tokens=int(meta["prompt_tokens"]),
            # none, where n > 1: a request that only fills the cache for those behind it
            output=max(1, int(meta["completion_tokens"])),
            is_cut=is_cut,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"a finished request that lacks a number: {error!r}") from None
