"""A load: requests whose prompts are made of parts, some of them shared; pure but for write()."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson

from eval.word_tokenizer import text


@dataclass(frozen=True)
class Request:
    """One prompt and how many tokens are generated for it.

    parts  (key, tokens) each, in order; parts of one key begin with the same tokens
    at     arrival, in mean gaps between two requests of the load; None: nobody says
    """

    parts: tuple[tuple[int, int], ...]
    output: int
    at: float | None = None

    @property
    def input(self) -> int:
        return sum(tokens for _, tokens in self.parts)


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival, at least one.

    dataset  flags with which SGLang's client draws such requests itself; none: it reads a file
    source   where lengths and arrivals come from, in words
    """

    name: str
    requests: tuple[Request, ...]
    source: str
    dataset: tuple[str, ...] = ()

    @property
    def has_arrivals(self) -> bool:
        return self.requests[0].at is not None

    def facts(self) -> dict:
        """Describe the load for a result file; tokens that a radix cache can find are `shared`."""
        inputs = sum(request.input for request in self.requests)
        return {
            "requests": len(self.requests),
            "input_tokens": inputs,
            "shared_tokens": inputs - distinct_tokens(self.requests),
            "output_tokens": sum(request.output for request in self.requests),
            "source": self.source,
        }

    def scaled(self, scale: Scale) -> Load:
        """Take the first requests, with all lengths scaled."""
        requests = (
            Request(
                tuple((key, scale.tokens(tokens)) for key, tokens in request.parts),
                scale.tokens(request.output),
                request.at,
            )
            for request in self.requests[: scale.number(len(self.requests))]
        )
        return replace(self, requests=tuple(requests))


@dataclass(frozen=True)
class Scale:
    """Factors for small machines: of token counts, and of the number of requests or groups."""

    length: float = 1.0
    count: float = 1.0

    def tokens(self, tokens: float) -> int:
        """Scale a length to at least 1; 0 stays 0."""
        return max(1, round(tokens * self.length)) if tokens else 0

    def number(self, number: int) -> int:
        return max(1, round(number * self.count))


def distinct_tokens(requests: Iterable[Request]) -> int:
    """Count prompt tokens with a prefix of their own: what an endless cache prefills."""
    longest: dict[tuple, int] = {}
    for request in requests:
        path: tuple = ()
        for key, tokens in request.parts:
            path = (*path, key)
            longest[path] = max(longest.get(path, 0), tokens)
    return sum(longest.values())


def prompts(requests: Iterable[Request], seed: int, vocab_size: int) -> Iterator[list[int]]:
    """Yield token ids of each prompt, the same whenever called with the same seed."""
    requests = list(requests)
    longest: dict[int, int] = {}
    for key, tokens in (part for request in requests for part in request.parts):
        longest[key] = max(longest.get(key, 0), tokens)
    ids = {
        key: np.random.default_rng((seed, key)).integers(vocab_size, size=tokens).tolist()
        for key, tokens in longest.items()
    }
    for request in requests:
        yield [token for key, tokens in request.parts for token in ids[key][:tokens]]


def write(load: Load, path: Path, *, seed: int, vocab_size: int, rate: float) -> None:
    """Write the requests as JSON lines that SGLang's `custom` dataset can read.

    A line has `conversations`, the prompt and an answer of as many words as are to be generated;
    for request_client.py also `output_len` and, at a finite `rate` (1/s) of a load with arrivals,
    `timestamp` in ms.
    """

    ids = prompts(load.requests, seed, vocab_size)
    with path.open("wb") as lines:
        for request, prompt in zip(load.requests, ids, strict=True):
            turns = [{"content": text(prompt)}, {"content": text([0] * request.output)}]
            row: dict = {"conversations": turns, "output_len": request.output}
            if load.has_arrivals and math.isfinite(rate):
                row["timestamp"] = 1e3 * request.at / rate
            lines.write(orjson.dumps(row) + b"\n")


def write_trace(load: Load, path: Path, *, seed: int, vocab_size: int, rate: float | None) -> None:
    """Write the requests as a trace of token ids: prompt, output_length and arrival in s.

    rate  1/s, None: all at once. Arrivals of a load that has none are exponential, seeded.
    """
    gaps = np.random.default_rng(seed).exponential(size=len(load.requests))
    drawn = (np.cumsum(gaps) - gaps[0]).tolist()
    ids = prompts(load.requests, seed, vocab_size)
    with path.open("wb") as lines:
        for request, prompt, at in zip(load.requests, ids, drawn, strict=True):
            row: dict = {"prompt": prompt, "output_length": request.output}
            if rate is not None:
                row["arrival"] = (request.at if load.has_arrivals else at) / rate
            lines.write(orjson.dumps(row) + b"\n")
