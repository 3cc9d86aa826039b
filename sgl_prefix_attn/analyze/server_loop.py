"""The loop of the simulated server, for numba: requests come, wait, are prefilled and decode.

As SGLang schedules by default: in the order of arrival, as soon as a request and all KV that the
running ones may come to need fit the pool, and prefill goes before decode.
"""

from __future__ import annotations

import math

import numpy as np

from sgl_prefix_attn.analyze.block_cache import C_HELD, C_USED, evict, find, hold, release
from sgl_prefix_attn.analyze.server_state import (
    N_ARRIVED,
    N_CACHED,
    N_CHANGED,
    N_COVERED,
    N_HELD,
    N_KV,
    N_LOOKED,
    N_NEXT,
    N_PROMPT,
    N_READ,
    N_RESERVED,
    N_RUNNING,
    N_STEPS,
    N_TOKENS,
    N_TOO_LONG,
    N_UNIQUE,
    N_WAITING,
    T_CLOCK,
    T_KV_TOKEN,
    T_PREFILL,
)
from sgl_prefix_attn.jit import cached_njit

PREFILL_TOKENS = 8192  # of one pass; SGLang's --chunked-prefill-size on these GPUs
LOOK = (
    64  # decode steps after which a batch that stays is looked at again, as the server's headroom
)


@cached_njit
def half_octave(tokens):
    """The place in State.rates of a batch with so many KV tokens."""
    return int(2 * math.log2(tokens))


@cached_njit
def step_seconds(costs, batch, attention):
    """Of a decode step of so many requests, of which all layers' attention takes `attention`."""
    return costs.step + costs.request * batch + attention


@cached_njit
def advance(requests, costs, state, stride):
    """Run until the batch about to decode is to be looked at: it has changed or grown by LOOK since
    the last look, which was at least `stride` steps ago. Returns False when all is done."""
    now, counts = state.now, state.counts
    while True:
        while _prefill(requests, costs, state):
            pass
        if counts[N_RUNNING] == 0:
            if counts[N_NEXT] == requests.arrival.size:
                return False
            now[T_CLOCK] = max(now[T_CLOCK], requests.arrival[counts[N_NEXT]])
            continue
        since = counts[N_STEPS] - counts[N_LOOKED]
        if since >= stride and (counts[N_CHANGED] == 1 or since >= LOOK):
            counts[N_LOOKED] = counts[N_STEPS]
            counts[N_CHANGED] = 0
            return True
        _decode(requests, costs, state)


@cached_njit
def _prefill(requests, costs, state):
    """Prefill what waits and fits, up to PREFILL_TOKENS. Returns whether there was anything."""
    now, counts = state.now, state.counts
    computed, seconds, first = 0, 0.0, counts[N_NEXT]
    while counts[N_ARRIVED] < requests.arrival.size:
        if requests.arrival[counts[N_ARRIVED]] > now[T_CLOCK]:
            break
        counts[N_ARRIVED] += 1
    old_running = counts[N_RUNNING]
    while counts[N_NEXT] < counts[N_ARRIVED] and computed < PREFILL_TOKENS:
        r = counts[N_NEXT]
        if counts[N_RUNNING] == costs.most_running or not _fits(requests, costs, state, r):
            if counts[N_RUNNING] > 0 or seconds > 0:
                break
            counts[N_TOO_LONG] += 1  # not even by itself
            counts[N_NEXT] += 1
            first = counts[N_NEXT]
            continue
        new = _admit(requests, costs, state, r)
        computed += new
        cached = requests.prompt[r] - new
        seconds += new * (costs.token + costs.token_pair * 0.5 * new + costs.cached_pair * cached)
        counts[N_NEXT] += 1
    counts[N_WAITING] = max(counts[N_WAITING], counts[N_ARRIVED] - counts[N_NEXT])
    if computed == 0:
        return False
    seconds = max(seconds, costs.step)
    now[T_CLOCK] += seconds
    now[T_PREFILL] += seconds
    for r in range(first, counts[N_NEXT]):
        state.begun[r] = now[T_CLOCK]
        state.ttft[r] = now[T_CLOCK] - requests.arrival[r]
    counts[N_CHANGED] = 1
    _drop_finished(requests, state, old_running)
    return True


@cached_njit
def _reserve(requests, r):
    """Tokens that a request may come to need besides its blocks."""
    return requests.output[r] + requests.prompt[r] - _covered(requests, r)


@cached_njit
def _covered(requests, r):
    return min(requests.prompt[r], requests.num_blocks[r] * requests.block_tokens)


@cached_njit
def _tokens(requests, r, i):
    return min(requests.block_tokens, requests.prompt[r] - i * requests.block_tokens)


@cached_njit
def _fits(requests, costs, state, r):
    cache = state.cache
    held = cache.counts[C_HELD]
    for i in range(requests.num_blocks[r]):
        slot = find(cache, requests.blocks[requests.first[r] + i])
        held += cache.names[slot] == 0 or cache.holders[slot] == 0
    reserved = state.counts[N_RESERVED] + _reserve(requests, r)
    return held * requests.block_tokens + reserved <= costs.kv_tokens


@cached_njit
def _admit(requests, costs, state, r):
    """Let a request into the batch. Returns its prompt's tokens that are not in the cache, at least
    one."""
    counts, cache = state.counts, state.cache
    cached = 0
    for i in range(requests.num_blocks[r]):
        tokens = _tokens(requests, r, i)
        was_there, is_first = hold(cache, requests.blocks[requests.first[r] + i])
        cached += tokens * was_there
        counts[N_HELD] += tokens * is_first
    counts[N_RESERVED] += _reserve(requests, r)
    while cache.counts[C_USED] * requests.block_tokens + counts[N_RESERVED] > costs.kv_tokens:
        if not evict(cache):
            break
    state.running[counts[N_RUNNING]] = r
    state.left[counts[N_RUNNING]] = requests.output[r] - 1
    counts[N_RUNNING] += 1
    counts[N_KV] += requests.prompt[r] + 1
    counts[N_COVERED] += _covered(requests, r)
    counts[N_PROMPT] += requests.prompt[r]
    cached = min(cached, requests.prompt[r] - 1)
    counts[N_CACHED] += cached
    return requests.prompt[r] - cached


@cached_njit
def _decode(requests, costs, state):
    """One decode step."""
    now, counts = state.now, state.counts
    batch = counts[N_RUNNING]
    rate = now[T_KV_TOKEN]
    if counts[N_CHANGED] == 1:  # it is not the batch looked at last
        rate = state.rates[half_octave(counts[N_KV])] or rate
    now[T_CLOCK] += step_seconds(costs, batch, rate * counts[N_KV])
    counts[N_STEPS] += 1
    counts[N_TOKENS] += batch
    counts[N_READ] += counts[N_KV]
    counts[N_UNIQUE] += counts[N_KV] - counts[N_COVERED] + counts[N_HELD]
    counts[N_KV] += batch
    is_over = False
    for i in range(batch):
        state.left[i] -= 1
        is_over |= state.left[i] == 0
    if is_over:
        counts[N_CHANGED] = 1
        _drop_finished(requests, state, 0)


@cached_njit
def _drop_finished(requests, state, first):
    """Take the requests from place `first` on that are done out of the batch."""
    counts, kept = state.counts, first
    for i in range(first, counts[N_RUNNING]):
        r = state.running[i]
        if state.left[i] > 0:
            state.running[kept], state.left[kept] = r, state.left[i]
            kept += 1
            continue
        if requests.output[r] > 1:
            seconds = state.now[T_CLOCK] - state.begun[r]
            state.tpot[r] = seconds / (requests.output[r] - 1)
        counts[N_KV] -= requests.prompt[r] + requests.output[r]
        counts[N_COVERED] -= _covered(requests, r)
        counts[N_RESERVED] -= _reserve(requests, r)
        # the deepest first: it is the first that may go
        for b in range(requests.num_blocks[r] - 1, -1, -1):
            if release(state.cache, requests.blocks[requests.first[r] + b]):
                counts[N_HELD] -= _tokens(requests, r, b)
    counts[N_RUNNING] = kept


@cached_njit
def lengths(requests, state):
    """KV tokens int64 [B] of each request of the batch, the one being decoded included."""
    batch = state.counts[N_RUNNING]
    out = np.empty(batch, np.int64)
    for i in range(batch):
        r = state.running[i]
        out[i] = requests.prompt[r] + requests.output[r] - state.left[i]
    return out
