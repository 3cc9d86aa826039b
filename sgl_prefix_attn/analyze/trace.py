"""A trace in memory: when its requests came, how long they are, and which blocks their prompts are
made of. A block is named by a hash of all that stands before it too, so that equal names mean equal
prefixes."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, replace

import numpy as np

from sgl_prefix_attn.jit import cached_njit

LATEST = 1e12  # seconds: a float64 still tells milliseconds apart


@dataclass(frozen=True)
class Request:
    """One request of a trace.

    arrival  seconds, None where the trace does not say
    prompt, output  tokens
    content  uint [...]  what the prompt's blocks are, equal where the prompts are: one number for
             each block, or `per_block` of them
    samples  requests that share the prompt (n > 1)
    is_cut   whether `content` ends before the prompt does
    """

    arrival: float | None
    prompt: int
    output: int
    content: np.ndarray
    per_block: int
    block_tokens: int
    samples: int = 1
    is_cut: bool = False

    def __post_init__(self):
        if self.prompt < 1 or self.output < 1:
            raise ValueError(f"{self.prompt} tokens of prompt, {self.output} of output: none")
        if max(self.prompt, self.output) >= 1 << 30:
            raise ValueError("more than 2^30 tokens")
        if not 1 <= self.samples <= 1 << 16:
            raise ValueError(f"{self.samples} samples of a prompt")
        if self.arrival is not None and not 0 <= self.arrival < LATEST:
            raise ValueError(f"arrival at {self.arrival} s")


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival, n of them.

    arrival       float64 [n]  seconds from the first
    prompt, output  int32 [n]  tokens
    first, count  int64, int32 [n]  where a request's blocks begin in `blocks`, and how many it has
    blocks        uint64 [...]
    block_tokens  tokens of a block; a prompt's last one may hold fewer, and what is behind its
                  blocks is nobody else's
    has_arrivals  whether the trace said when requests came
    """

    arrival: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    first: np.ndarray
    count: np.ndarray
    blocks: np.ndarray
    block_tokens: int
    has_arrivals: bool

    def __len__(self) -> int:
        return self.arrival.size

    def at_rate(self, rate: float) -> Trace:
        """Let `rate` requests come in a second, on average: as unevenly as in the trace, or evenly
        where they all come at once. Raises ValueError for a rate at which the last would never
        come."""
        span = float(self.arrival[-1])
        wanted = (len(self) - 1) / rate
        if wanted >= LATEST:
            raise ValueError(
                f"--rate {rate:g}: {len(self):,} requests would take {wanted:.1e} s to come, more "
                f"than {LATEST:.0e}"
            )
        stretch = wanted / span if span > 0 else math.inf
        if math.isfinite(stretch):
            return replace(self, arrival=self.arrival * stretch)
        return replace(self, arrival=np.arange(len(self)) / rate, has_arrivals=True)


class TraceBuilder:
    """Collects requests, 28 bytes each and 8 for each block."""

    def __init__(self):
        self._arrival, self._first = array("d"), array("q")
        self._sizes, self._blocks = array("i"), array("Q")
        self._without_arrival = 0
        self._block_tokens = 0

    @property
    def is_empty(self) -> bool:
        return not self._arrival

    def add(self, request: Request) -> None:
        """Take one more. Raises ValueError where its blocks are not those of the others."""
        if self._block_tokens not in (0, request.block_tokens):
            raise ValueError(
                f"blocks of {request.block_tokens} tokens, those before had {self._block_tokens}"
            )
        self._block_tokens = request.block_tokens
        names = block_names(
            request.content.astype(np.uint64), request.per_block,
            request.prompt, request.block_tokens,
        )  # fmt: skip
        self._without_arrival += request.arrival is None
        for _ in range(request.samples):
            self._arrival.append(request.arrival or 0.0)
            self._first.append(len(self._blocks))
            self._sizes.extend((request.prompt, request.output, names.size))
        self._blocks.frombytes(names.tobytes())

    def finish(self) -> Trace:
        """Return what was collected. Raises ValueError without any request."""
        if self.is_empty:
            raise ValueError("it holds no request")
        arrival = np.frombuffer(self._arrival)
        prompt, output, count = np.frombuffer(self._sizes, np.int32).reshape(-1, 3).T
        if self._without_arrival:  # those that say when they came could mean any clock
            arrival = np.zeros_like(arrival)
        order = np.argsort(arrival, kind="stable")
        return Trace(
            arrival=arrival[order] - arrival[order[0]],
            prompt=prompt[order],
            output=output[order],
            first=np.frombuffer(self._first, np.int64)[order],
            count=count[order],
            blocks=np.frombuffer(self._blocks, np.uint64),
            block_tokens=self._block_tokens,
            has_arrivals=not self._without_arrival,
        )


@cached_njit
def block_names(content, per_block, prompt, block_tokens):
    """Names uint64 of a prompt's blocks, from `per_block` numbers each; a last one that holds fewer
    tokens has a name of its own. At most as many as the prompt has, at least those that content
    fills."""
    most = -(-prompt // block_tokens)
    size = min(most, -(-content.size // per_block))
    names = np.empty(size, np.uint64)
    name = np.uint64(0x9E3779B97F4A7C15)
    for i in range(size):
        begin = i * per_block
        for j in range(begin, min(begin + per_block, content.size)):
            name = _mixed(name ^ content[j])
        name = _mixed(name ^ np.uint64(min(block_tokens, prompt - i * block_tokens)))
        names[i] = name
    return names


@cached_njit
def _mixed(x):
    """The finalizer of SplitMix64."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
