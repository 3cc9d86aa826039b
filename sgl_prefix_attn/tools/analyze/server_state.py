"""What the loop of the simulated server works on besides the trace: costs, and all that changes, in
arrays that numba's loops share with Python.

numba's cache on disk has the classes by name: where one moves, a developer's cache must go.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgl_prefix_attn.tools.analyze.block_cache import BlockCache, new_cache
from sgl_prefix_attn.tools.analyze.trace import Trace

# Places in State.now and State.counts.
T_CLOCK, T_KV_TOKEN, T_PREFILL = range(3)
(N_NEXT, N_ARRIVED, N_RUNNING, N_RESERVED, N_KV, N_COVERED, N_HELD, N_STEPS, N_LOOKED, N_CHANGED,
 N_TOKENS, N_READ, N_UNIQUE, N_TOO_LONG, N_PROMPT, N_CACHED, N_WAITING) = range(17)  # fmt: skip


class Costs(NamedTuple):
    """Seconds, floating point operations and sizes of the simulated server.

    step, request  seconds of a decode step besides attention, and more for each request
    token          seconds of prefill for a token ...
    token_pair     ... for each new token that it attends to
    cached_pair    ... and for each cached one
    kv_tokens      room for KV
    most_running   requests of a decode step
    """

    step: float
    request: float
    token: float
    token_pair: float
    cached_pair: float
    kv_tokens: int
    most_running: int


class State(NamedTuple):
    """now     float64 [3]: the clock, attention seconds for a KV token of the batch looked at last,
            seconds of prefill so far
    counts  int64 [17]: next request, how many have come, run; tokens reserved, KV tokens, those of
            the running ones' blocks one by one and each counted once; decode steps, the step last
            looked at, whether the batch has changed since; sums over steps of tokens decoded, KV
            tokens read one request at a time, and unique ones; requests that are too long; tokens
            of prompts, and those found in the cache; most that ever waited
    running, left  int64 [most_running or n, the smaller]  requests of the batch and tokens that
            they still generate
    rates   float64 [128]  attention seconds for a KV token of batches like those looked at before,
            by half octaves of their KV tokens; 0 where there was none
    covered, reserve  int64 [n]  tokens of a prompt that its blocks hold, and those that the request
            may come to need besides
    begun, ttft, tpot  float64, float32, float32 [n]  when the first token was there, seconds; NaN
            where there is none
    """

    now: np.ndarray
    counts: np.ndarray
    running: np.ndarray
    left: np.ndarray
    rates: np.ndarray
    covered: np.ndarray
    reserve: np.ndarray
    begun: np.ndarray
    ttft: np.ndarray
    tpot: np.ndarray
    cache: BlockCache


def new_state(trace: Trace, costs: Costs) -> State:
    requests = trace.size
    # However large the server is: no more than the trace can come to use.
    most_running = min(costs.most_running, requests)
    covered = np.minimum(trace.prompt, trace.num_blocks.astype(np.int64) * trace.block_tokens)
    counts = np.zeros(17, np.int64)
    counts[N_LOOKED] = -(1 << 40)  # never
    return State(
        now=np.zeros(3),
        counts=counts,
        running=np.zeros(most_running, np.int64),
        left=np.zeros(most_running, np.int64),
        rates=np.zeros(128),  # by half octaves of up to 2^63 tokens
        covered=covered,
        reserve=trace.output + trace.prompt - covered,
        begun=np.zeros(requests),
        ttft=np.full(requests, np.nan, np.float32),
        tpot=np.full(requests, np.nan, np.float32),
        cache=new_cache(trace.distinct_blocks),
    )
