"""A trace as requests: read, scaled, and a window of it at a wanted rate; pure but for read().

The format is Mooncake's: one JSON object per line with timestamp (ms), input_length, output_length
and hash_ids, one id for each 512 tokens of the prompt. Equal ids stand for equal tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

BLOCK = 512  # prompt tokens behind one hash id
_FIELDS = "timestamp, input_length, output_length and hash_ids"


@dataclass(frozen=True)
class Request:
    """`at` seconds from the start; lengths in tokens; one hash id for each block of the prompt."""

    at: float
    input: int
    output: int
    hashes: tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """Requests of a replay, the first at 0 s; `skipped` of the same stretch were too long."""

    requests: tuple[Request, ...]
    skipped: int


def read(path: str | Path) -> list[Request]:
    """Read the trace in order of arrival. Raises ValueError naming file and line; OSError."""
    requests = []
    with Path(path).open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                requests.append(_parse(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected an object with {_FIELDS}: {error!r}"
                ) from None
    return sorted(requests, key=lambda request: request.at)


def _parse(line: str) -> Request:
    row = json.loads(line)
    request = Request(
        at=row["timestamp"] / 1e3,
        input=int(row["input_length"]),
        output=int(row["output_length"]),
        hashes=tuple(row["hash_ids"]),
    )
    if not all(isinstance(h, int) and h >= 0 for h in request.hashes):
        raise ValueError("hash_ids must be integers of at least 0")
    if request.input < 1 or request.output < 1:
        raise ValueError("lengths must be at least 1")
    if len(request.hashes) * BLOCK < request.input:
        raise ValueError(f"{len(request.hashes)} hash_ids for {request.input} tokens")
    return request


def scaled_block(factor: float) -> int:
    """Return the tokens of a block at this length scale. Raises ValueError when none is left."""
    block = round(BLOCK * factor)
    if block < 1:
        raise ValueError(f"length scale {factor}: must be at least 1/{BLOCK}")
    return block


def scale(requests: list[Request], factor: float) -> list[Request]:
    """Multiply lengths by `factor`, to at least 1; the hash ids, and so what is shared, stay."""
    block = scaled_block(factor)
    return [
        replace(
            request,
            # Rounding the block must not leave a prompt longer than its blocks.
            input=min(max(1, round(request.input * factor)), len(request.hashes) * block),
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


def prompts(requests: tuple[Request, ...], block: int, vocab_size: int) -> list[list[int]]:
    """Return token ids of each prompt; blocks of equal hash id are equal, whenever called."""
    blocks: dict[int, list[int]] = {}
    for hash_id in {h for request in requests for h in request.hashes}:
        rng = np.random.default_rng(hash_id)
        blocks[hash_id] = rng.integers(vocab_size // 8, vocab_size, block).tolist()
    return [
        [token for h in request.hashes for token in blocks[h]][: request.input]
        for request in requests
    ]
