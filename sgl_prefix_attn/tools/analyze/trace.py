"""A trace in memory: when its requests came, how long they are, and which blocks their prompts are
made of."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sgl_prefix_attn.tools.analyze.blocks import block_names, inferred_block_tokens

BLOCK = 32  # tokens of a prompt that are compared at once
LATEST = 1e12  # seconds: a float64 still tells milliseconds apart


@dataclass(frozen=True)
class Request:
    """One request of a trace.

    arrival  seconds, None where the trace does not say
    prompt, output  tokens
    content  uint [...]  equal where the prompts are: `per_token` numbers for each token; with None
             a hash id for each block, whose size the line does not say
    is_counted  whether a server counted the tokens of a text, and per_token is only a guess
    samples  requests that share the prompt (n > 1)
    is_cut   whether `content` ends before the prompt does
    """

    arrival: float | None
    prompt: int
    output: int
    content: np.ndarray
    per_token: float | None
    samples: int = 1
    is_cut: bool = False
    is_counted: bool = False

    def __post_init__(self):
        if self.prompt < 1 or self.output < 1:
            raise ValueError(f"{self.prompt} tokens of prompt, {self.output} of output: none")
        if max(self.prompt, self.output) >= 1 << 30:
            raise ValueError("more than 2^30 tokens")
        if not 1 <= self.samples <= 1 << 16:
            raise ValueError(f"{self.samples} samples of a prompt")
        if self.arrival is not None and not 0 <= self.arrival < LATEST:
            raise ValueError(f"arrival at {self.arrival} s: is it another --time-unit?")

    @property
    def block_tokens(self) -> int | None:
        """Return the tokens that are compared at once, None for those behind a hash id."""
        return None if self.per_token is None else BLOCK

    @property
    def kind(self) -> str:
        what = "hash_ids" if self.per_token is None else "a prompt"
        return f"{what} {'without' if self.arrival is None else 'and'} an arrival"


class Trace(NamedTuple):
    """Requests in the order of their arrival, n of them, as numba's loops read them.

    arrival       float64 [n]  seconds from the first
    prompt, output  int32 [n]  tokens
    first, num_blocks  int64, int32 [n]  where a request's blocks begin in `blocks`, and how many it
                  has
    blocks        int32 [...], equal where the prompts are up to there: 0 to distinct_blocks - 1
    block_tokens  tokens of a block; a prompt's last one may hold fewer, and what is behind its
                  blocks is nobody else's
    has_arrivals  whether the trace said when requests came
    """

    arrival: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    first: np.ndarray
    num_blocks: np.ndarray
    blocks: np.ndarray
    distinct_blocks: int
    block_tokens: int
    has_arrivals: bool

    @property
    def size(self) -> int:
        """Count the requests."""
        return self.arrival.size

    def at_rate(self, rate: float) -> Trace:
        """Let `rate` requests come in a second, on average: as unevenly as in the trace, or evenly
        where they all come at once. Raises ValueError where the last would come after LATEST."""
        end = (self.size - 1) / rate
        if end >= LATEST:
            raise ValueError(f"--rate {rate:g}: the last request would come after {LATEST:g} s")
        if span := self.arrival[-1]:
            return self._replace(arrival=self.arrival / span * end)
        return self._replace(arrival=np.arange(self.size) / rate, has_arrivals=True)


# A request of a trace that is being read: `first` and `num_blocks` are those of Trace.
_ROW = np.dtype(
    [("arrival", "f8"), ("first", "i8"), ("prompt", "i4"), ("output", "i4"), ("num_blocks", "i4")]
)


class TraceBuilder:
    """Collects requests, 28 bytes each and 8 for each block."""

    def __init__(self):
        self._rows, self._blocks = bytearray(), array("Q")
        self._first: Request | None = None
        self._unlike: Counter[str] = Counter()  # kinds of requests that were refused

    @property
    def is_empty(self) -> bool:
        return self._first is None

    def add(self, request: Request) -> None:
        """Take one more. Raises ValueError for one of another kind than the first: a prompt, or an
        arrival, where that has none, and the reverse."""
        self._first = self._first or request
        if request.kind != self._first.kind:
            self._unlike[request.kind] += 1
            raise ValueError(f"it has {request.kind}, the first {self._first.kind}")
        blocks = request.content.astype(np.uint64)
        if request.per_token is not None:
            per_block = max(1, round(BLOCK * request.per_token))
            if request.is_cut:  # within a block, perhaps
                blocks = blocks[: blocks.size // per_block * per_block]
            blocks = block_names(blocks, per_block, request.prompt, BLOCK)
        row = request.arrival or 0.0, len(self._blocks), request.prompt, request.output, blocks.size
        self._rows += request.samples * np.array(row, _ROW).tobytes()
        self._blocks.frombytes(blocks.tobytes())

    def finish(self) -> tuple[Trace, list[str]]:
        """Return what was collected, and what there is to know about it: the size of blocks with
        hash ids, and how many requests do not have it. Raises ValueError where there is no request,
        where most are unlike the first, and where no such size can be inferred."""
        if self._first is None:
            raise ValueError("it holds no request")
        rows, blocks = np.frombuffer(self._rows, _ROW), np.frombuffer(self._blocks, np.uint64)
        if (unlike := self._unlike.total()) > len(rows):
            raise ValueError(
                f"{unlike:,} requests have {' or '.join(self._unlike)}, {len(rows):,} like the "
                f"first {self._first.kind}: leave those out"
            )
        notes: list[str] = []
        block_tokens = self._first.block_tokens
        if block_tokens is None:
            block_tokens = inferred_block_tokens(rows["prompt"], rows["num_blocks"])
            said = "tokens behind a hash id, as input_length / len(hash_ids) says"
            notes.append(f"{block_tokens:,} {said}")
            fitting = -(-rows["prompt"] // block_tokens) == rows["num_blocks"]
            if left_out := int((~fitting).sum()):
                whose = f"whose hash_ids do not fit {block_tokens:,} tokens"
                notes.append(f"{left_out:,} requests {whose}, left out")
            rows = rows[fitting]
            for first, prompt, count in rows[["first", "prompt", "num_blocks"]].tolist():
                ids = blocks[first : first + count]
                ids[:] = block_names(ids, 1, prompt, block_tokens)
        rows = rows[np.argsort(rows["arrival"], kind="stable")]
        names, numbers = np.unique(blocks, return_inverse=True)
        trace = Trace(
            arrival=rows["arrival"] - rows["arrival"][0],
            prompt=rows["prompt"].copy(),
            output=rows["output"].copy(),
            first=rows["first"].copy(),
            num_blocks=rows["num_blocks"].copy(),
            blocks=numbers.astype(np.int32),
            distinct_blocks=names.size,
            block_tokens=block_tokens,
            has_arrivals=self._first.arrival is not None,
        )
        return trace, notes
