"""What the lines of a trace come in: compression, a JSON list, the envelopes of whatever collects a
server's log."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, BinaryIO

import orjson

from sgl_prefix_attn.tools.analyze.trace_lines import is_request

_LIST = re.compile(rb"\s*\[\s*(\{|$)")  # not a line of a log, which begins with [2026-
_CRI = re.compile(rb"\d{4}-\d\d-\d\dT\S+ (stdout|stderr) ([FP]) ")
# Where Docker, Fluent Bit, Loki, journald and Google's collector put a line.
_TEXT = ("log", "message", "msg", "line", "MESSAGE", "textPayload")
_DOCKER_PIECE = range(1 << 14, (1 << 14) + 19)  # bytes; a character cut in two takes more
_LENGTHS_ONLY = {
    b"timestamp,contexttokens,generatedtokens": "Azure's CSV",
    b"timestamp,model,request tokens,response tokens": "BurstGPT's CSV",
}


def decompressed(file: BinaryIO) -> Iterator[bytes]:
    """Read the lines of a file that may be compressed by gzip or Zstandard.

    Raises ValueError where it is damaged, and where nothing can read Zstandard.
    """
    buffered = io.BufferedReader(file, 1 << 20)  # type: ignore[type-var]
    lines: Iterable[bytes] = buffered
    damaged: tuple[type[Exception], ...] = ()
    head = buffered.peek(4)
    if head.startswith(b"\x1f\x8b"):
        lines, damaged = gzip.open(buffered), (EOFError, zlib.error, gzip.BadGzipFile)
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        lines, damaged = _zstandard(buffered)
    try:
        yield from lines
    except damaged as error:
        raise ValueError(f"its compression is damaged: {error}") from None


def _zstandard(file: BinaryIO) -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        import zstandard
    except ImportError:
        raise ValueError("it is compressed by Zstandard: pip install zstandard") from None
    stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return io.BufferedReader(stream), (zstandard.ZstdError,)


def unpacked(lines: Iterable[bytes]) -> Iterator[Any]:
    """Return a trace's lines, or the entries of a file that is one JSON list.

    The first line that is not empty says which it is. Raises ValueError for a list that is no JSON,
    and for a CSV file that only has lengths.
    """
    lines, head = iter(lines), []
    for line in lines:
        head.append(line)
        if not line.isspace():
            break
    first, lines = b"".join(head).strip(), chain(head, lines)
    for columns, name in _LENGTHS_ONLY.items():
        if first.lower().startswith(columns):
            raise ValueError(
                f"{name} has times and lengths but no prompts, so it cannot tell which requests "
                "share a prefix: give prompts, hash_ids or a log of --log-requests"
            )
    if _LIST.match(first):
        try:
            return iter(orjson.loads(b"".join(lines)))
        except orjson.JSONDecodeError as error:
            raise ValueError(f"it begins as a JSON list, but is none: {error}") from None
    for opened in (_cri, _json):
        if opened(first):
            return _joined(lines, opened)
    return lines


# Which of the server's two streams a piece of a line belongs to, its text, whether it is the last.
_Piece = tuple[Any, bytes, bool]


def _joined(lines: Iterable[bytes], opened: Callable[[bytes], _Piece | None]) -> Iterator[bytes]:
    """The lines in their envelopes, of which long ones have several; those in none as they are."""
    begun: dict[Any, bytes] = defaultdict(bytes)
    for line in lines:
        stream, text, is_last = opened(line) or (None, line, True)
        begun[stream] += text
        if is_last:
            yield begun.pop(stream)
    yield from begun.values()  # the file ends inside of them


def _cri(line: bytes) -> _Piece | None:
    """A line of a file below /var/log/pods."""
    if (found := _CRI.match(line)) is None:
        return None
    is_last, text = found[2] == b"F", line[found.end() :]
    return found[1], text if is_last else text[:-1], is_last


def _json(line: bytes) -> _Piece | None:
    """A JSON object that has a line of the log in one of its fields."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(row, dict) or is_request(row):
        return None
    for name in _TEXT:
        if isinstance(text := row.get(name), str):
            data = text.encode(errors="replace")
            is_last = data.endswith(b"\n") or len(data) not in _DOCKER_PIECE
            return str(row.get("stream", "")), data, is_last
    return None
