"""A trace as requests: read, scaled, and a window of it at a wanted rate; pure but for read().

The format is Mooncake's: one JSON object per line with timestamp (ms), input_length, output_length
and hash_ids, one id for each 512 tokens of the prompt. Equal ids stand for equal tokens: each is
the key of a part of the prompt. Arrivals are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from eval.workloads.load import Request
from sgl_prefix_attn.tools.analyze import trace_lines

BLOCK = 512  # prompt tokens behind one hash id
_FIELDS = "timestamp, input_length, output_length and hash_ids"


@dataclass(frozen=True)
class Window:
    """Requests of a replay, the first at 0 s; `skipped` of the same stretch were too long."""

    requests: tuple[Request, ...]
    skipped: int


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
            parts = in_blocks(found.content.tolist(), found.prompt)
            requests.append(Request(parts, found.output, found.arrival))
    return sorted(requests, key=lambda request: request.at)


def in_blocks(
    hash_ids: Iterable[int], tokens: int, block: int = BLOCK
) -> tuple[tuple[int, int], ...]:
    """Return a block as a part for each hash id; the last one ends with the prompt's tokens."""
    starts = range(0, tokens, block)
    return tuple(
        (key, min(block, tokens - start)) for key, start in zip(hash_ids, starts, strict=False)
    )


def scale(requests: list[Request], factor: float) -> list[Request]:
    """Multiply lengths by `factor`, to at least 1; the hash ids, and so what is shared, stay.

    Raises ValueError when no token of a block is left."""
    block = round(BLOCK * factor)
    if block < 1:
        raise ValueError(f"length scale {factor}: must be at least 1/{BLOCK}")
    return [
        replace(
            request,
            parts=in_blocks(
                (key for key, _ in request.parts), max(1, round(request.input * factor)), block
            ),
            output=max(1, round(request.output * factor)),
        )
        for request in requests
    ]


def window(
    requests: list[Request], rate: float, seconds: float, skip: float, longest: int
) -> Window:
    """Take the `rate * seconds` requests that follow `skip` seconds of the trace, in `seconds`.

    Their arrivals (see spread) are all multiplied by one number, so the mean rate up to the next
    request is `rate` and busy stretches stay busy. A request of more than `longest` tokens, prompt
    and output, is left out. Raises ValueError when the trace is too short.
    """
    count = round(rate * seconds)
    if count < 1:
        raise ValueError(f"rate {rate} for {seconds} s (--rates, --seconds): not one request")
    later = [request for request in requests if request.at >= skip]
    fits = [i for i, request in enumerate(later) if request.input + request.output <= longest]
    if len(fits) <= count:
        raise ValueError(
            f"rate {rate} for {seconds} s (--rates, --seconds) needs {count + 1} requests; after "
            f"{skip} s the trace has {len(fits)} of at most {longest} tokens"
        )
    arrivals = spread([later[i] for i in fits])
    first, end = arrivals[0].at, arrivals[count].at
    if end <= first:
        raise ValueError(f"the {count + 1} requests after {skip} s arrive all at once: no rate")
    stretch = count / rate / (end - first)
    return Window(
        tuple(replace(r, at=(r.at - first) * stretch) for r in arrivals[:count]),
        skipped=fits[count] - count,
    )


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
