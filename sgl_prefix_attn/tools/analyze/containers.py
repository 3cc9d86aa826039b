"""What the lines of a trace come in: compression, a JSON list."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, BinaryIO

import orjson

_LIST = re.compile(rb"\s*\[\s*(\{|$)")  # not a line of a log, which begins with [2026-


def decompressed(file: BinaryIO) -> Iterator[bytes]:
    """Read the lines of a file that may be compressed by gzip. Raises ValueError where it is
    damaged."""
    buffered = io.BufferedReader(file, 1 << 20)  # type: ignore[type-var]
    is_gzip = buffered.peek(2).startswith(b"\x1f\x8b")
    try:
        yield from gzip.open(buffered) if is_gzip else buffered
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"its compression is damaged: {error}") from None


def unpacked(lines: Iterable[bytes]) -> Iterator[Any]:
    """Return a trace's lines, or the entries of a file that is one JSON list.

    The first line that is not empty says which it is. Raises ValueError for a list that is no JSON.
    """
    lines = iter(lines)
    head: list[bytes] = []
    for line in lines:
        head.append(line if head else line.removeprefix(codecs.BOM_UTF8))
        if not line.isspace():
            break
    lines = chain(head, lines)
    if not _LIST.match(b"".join(head)):
        return lines
    try:
        return iter(orjson.loads(b"".join(lines)))
    except orjson.JSONDecodeError as error:
        raise ValueError(f"it begins as a JSON list, but is none: {error}") from None
