"""Mooncake's traces as requests: read, and the first of them; pure but for read().

The format: one JSON object per line with timestamp (ms), input_length, output_length
and hash_ids, one id for each 512 tokens of the prompt. Equal ids stand for equal tokens: each is
the key of a part of the prompt. Arrivals are in seconds.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

from eval.workloads.load import Request
from sgl_prefix_attn.tools.analyze import trace_lines

BLOCK = 512  # prompt tokens behind one hash id
_FIELDS = "timestamp, input_length, output_length and hash_ids"


def read(path: str | Path) -> list[Request]:
    """Read the trace in order of arrival. Raises ValueError naming file and line; OSError."""
    requests = []
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found = trace_lines.parse(line)
                if found.block_tokens is not None or found.arrival is None:
                    raise ValueError("it has no hash_ids, or no time")
                if found.content.size * BLOCK < found.prompt:
                    raise ValueError(f"{found.content.size} hash_ids for {found.prompt} tokens")
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: expected an object with {_FIELDS}: {error}"
                ) from None
            starts = range(0, found.prompt, BLOCK)  # the last block ends with the prompt's tokens
            sizes = (min(BLOCK, found.prompt - start) for start in starts)
            parts = tuple(zip(found.content.tolist(), sizes, strict=False))
            requests.append(Request(parts, found.output, found.arrival))
    return sorted(requests, key=lambda request: request.at)


def first(requests: list[Request], count: int, longest: int) -> list[Request]:
    """Take the first `count` requests of at most `longest` tokens, prompt and output.

    Their arrivals (see spread) are in mean gaps up to the next such request, the first at 0, so
    busy stretches stay busy. Raises ValueError when the trace is too short.
    """
    fits = [request for request in requests if request.input + request.output <= longest]
    if len(fits) <= count:
        raise ValueError(
            f"{count + 1} requests of at most {longest} tokens are needed, the trace has "
            f"{len(fits)}"
        )
    arrivals = spread(fits)
    start, end = arrivals[0].at, arrivals[count].at
    if end <= start:
        raise ValueError(f"the first {count + 1} requests of the trace arrive all at once")
    gap = (end - start) / count
    return [replace(request, at=(request.at - start) / gap) for request in arrivals[:count]]


def spread(requests: list[Request]) -> list[Request]:
    """Spread requests of one timestamp over the time to the next one; those of the last stay.

    A recorded time is a rounded one, Mooncake's to 3 s: sent as it stands, ten requests would come
    at once every 3 s, and which of them share a prefill would be left to chance.
    """
    groups = [list(group) for _, group in groupby(requests, key=lambda request: request.at)]
    ends = [group[0].at for group in groups[1:]] + [group[0].at for group in groups[-1:]]
    return [
        replace(request, at=request.at + (end - request.at) * i / len(group))
        for group, end in zip(groups, ends, strict=True)
        for i, request in enumerate(group)
    ]
