"""The loop of the simulated server, for numba: requests come, wait, are prefilled and decode.

As SGLang schedules by default: in the order of arrival, as soon as a request and all KV that the
running ones may come to need fit the pool, and prefill goes before decode.
"""

from __future__ import annotations

import math

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.records import PathTable
from sgl_prefix_attn.tools.analyze import server_state as sv
from sgl_prefix_attn.tools.analyze.block_cache import C_HELD, C_USED, evict, hold, release
from sgl_prefix_attn.tools.analyze.trace import Trace

PREFILL_TOKENS = 8192  # of one pass; SGLang's --chunked-prefill-size on these GPUs
# Decode steps after which a batch that stays is looked at again, as the server's headroom.
LOOK = 64


@cached_njit
def half_octave(tokens):
    """Return the place in State.rates of a batch with so many KV tokens."""
    return int(2 * math.log2(tokens))


@cached_njit
def step_seconds(costs, batch, attention):
    """Return the seconds of a decode step of so many requests, `attention` in all layers."""
    return costs.step + costs.request * batch + attention


@cached_njit
def advance(requests, costs, state, stride):
    """Run until the batch about to decode is to be looked at: it has changed or grown by LOOK since
    the last look, which was at least `stride` steps ago. Returns False when all is done."""
    now, counts = state.now, state.counts
    while True:
        while _prefill(requests, costs, state):
            pass
        if counts[sv.N_RUNNING] == 0:
            if counts[sv.N_NEXT] == requests.arrival.size:
                return False
            now[sv.T_CLOCK] = max(now[sv.T_CLOCK], requests.arrival[counts[sv.N_NEXT]])
            continue
        since = counts[sv.N_STEPS] - counts[sv.N_LOOKED]
        if since >= stride and (counts[sv.N_CHANGED] == 1 or since >= LOOK):
            counts[sv.N_LOOKED] = counts[sv.N_STEPS]
            counts[sv.N_CHANGED] = 0
            return True
        _decode(requests, costs, state)


@cached_njit
def _prefill(requests, costs, state):
    """Prefill what waits and fits, up to PREFILL_TOKENS. Returns whether there was anything."""
    now, counts = state.now, state.counts
    computed, seconds, first = 0, 0.0, counts[sv.N_NEXT]
    while counts[sv.N_ARRIVED] < requests.arrival.size:
        if requests.arrival[counts[sv.N_ARRIVED]] > now[sv.T_CLOCK]:
            break
        counts[sv.N_ARRIVED] += 1
    old_running = counts[sv.N_RUNNING]
    while counts[sv.N_NEXT] < counts[sv.N_ARRIVED] and computed < PREFILL_TOKENS:
        r = counts[sv.N_NEXT]
        if counts[sv.N_RUNNING] == costs.most_running or not _fits(requests, costs, state, r):
            if counts[sv.N_RUNNING] > 0 or seconds > 0:
                break
            counts[sv.N_TOO_LONG] += 1  # not even by itself
            counts[sv.N_NEXT] += 1
            first = counts[sv.N_NEXT]
            continue
        new = _admit(requests, costs, state, r)
        computed += new
        cached = requests.prompt[r] - new
        seconds += new * (costs.token + costs.token_pair * 0.5 * new + costs.cached_pair * cached)
        counts[sv.N_NEXT] += 1
    counts[sv.N_WAITING] = max(counts[sv.N_WAITING], counts[sv.N_ARRIVED] - counts[sv.N_NEXT])
    if computed == 0:
        return False
    seconds = max(seconds, costs.step)
    now[sv.T_CLOCK] += seconds
    now[sv.T_PREFILL] += seconds
    for r in range(first, counts[sv.N_NEXT]):
        state.begun[r] = now[sv.T_CLOCK]
        state.ttft[r] = now[sv.T_CLOCK] - requests.arrival[r]
    counts[sv.N_CHANGED] = 1
    _drop_finished(requests, state, old_running)
    return True


@cached_njit
def _tokens(requests, r, i):
    return min(requests.block_tokens, requests.prompt[r] - i * requests.block_tokens)


@cached_njit
def _fits(requests, costs, state, r):
    cache = state.cache
    held = cache.counts[C_HELD]
    for i in range(requests.num_blocks[r]):
        held += cache.holders[requests.blocks[requests.first[r] + i]] <= 0
    reserved = state.counts[sv.N_RESERVED] + state.reserve[r]
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
        counts[sv.N_HELD] += tokens * is_first
    counts[sv.N_RESERVED] += state.reserve[r]
    while cache.counts[C_USED] * requests.block_tokens + counts[sv.N_RESERVED] > costs.kv_tokens:
        if not evict(cache):
            break
    state.running[counts[sv.N_RUNNING]] = r
    state.left[counts[sv.N_RUNNING]] = requests.output[r] - 1
    counts[sv.N_RUNNING] += 1
    counts[sv.N_KV] += requests.prompt[r] + 1
    counts[sv.N_COVERED] += state.covered[r]
    counts[sv.N_PROMPT] += requests.prompt[r]
    cached = min(cached, requests.prompt[r] - 1)
    counts[sv.N_CACHED] += cached
    return requests.prompt[r] - cached


@cached_njit
def _decode(requests, costs, state):
    """One decode step."""
    now, counts = state.now, state.counts
    batch = counts[sv.N_RUNNING]
    rate = now[sv.T_KV_TOKEN]
    if counts[sv.N_CHANGED] == 1:  # it is not the batch looked at last
        rate = state.rates[half_octave(counts[sv.N_KV])] or rate
    now[sv.T_CLOCK] += step_seconds(costs, batch, rate * counts[sv.N_KV])
    counts[sv.N_STEPS] += 1
    counts[sv.N_TOKENS] += batch
    counts[sv.N_READ] += counts[sv.N_KV]
    counts[sv.N_UNIQUE] += counts[sv.N_KV] - counts[sv.N_COVERED] + counts[sv.N_HELD]
    counts[sv.N_KV] += batch
    is_over = False
    for i in range(batch):
        state.left[i] -= 1
        is_over |= state.left[i] == 0
    if is_over:
        counts[sv.N_CHANGED] = 1
        _drop_finished(requests, state, 0)


@cached_njit
def _drop_finished(requests, state, first):
    """Take the requests from place `first` on that are done out of the batch."""
    counts, kept = state.counts, first
    for i in range(first, counts[sv.N_RUNNING]):
        r = state.running[i]
        if state.left[i] > 0:
            state.running[kept], state.left[kept] = r, state.left[i]
            kept += 1
            continue
        if requests.output[r] > 1:
            seconds = state.now[sv.T_CLOCK] - state.begun[r]
            state.tpot[r] = seconds / (requests.output[r] - 1)
        counts[sv.N_KV] -= requests.prompt[r] + requests.output[r]
        counts[sv.N_COVERED] -= state.covered[r]
        counts[sv.N_RESERVED] -= state.reserve[r]
        # the deepest first: it is the first that may go
        for b in range(requests.num_blocks[r] - 1, -1, -1):
            if release(state.cache, requests.blocks[requests.first[r] + b]):
                counts[sv.N_HELD] -= _tokens(requests, r, b)
    counts[sv.N_RUNNING] = kept


@cached_njit
def lengths(requests, state):
    """Return KV tokens int64 [B] of each request of the batch, with the one being decoded."""
    batch = state.counts[sv.N_RUNNING]
    out = np.empty(batch, np.int64)
    for i in range(batch):
        r = state.running[i]
        out[i] = requests.prompt[r] + requests.output[r] - state.left[i]
    return out


def batch_paths(
    requests: Trace, rows: np.ndarray, seq_lens: np.ndarray, node_of: np.ndarray
) -> PathTable:
    """Return the paths of the requests `rows` int64 [B], whose lengths are seq_lens int64 [B]: a
    node for each block of their prompts. node_of int32 [blocks] holds -1, before and after."""
    parent, length, leaf = _nodes(requests, node_of, rows)
    return PathTable.of(parent, length, leaf, seq_lens)


@cached_njit
def _nodes(requests, node_of, rows):
    most = 0
    for r in rows:
        most += requests.num_blocks[r]
    parent, length = np.empty(most, np.int32), np.empty(most, np.int32)
    blocks = np.empty(most, np.int32)
    leaf = np.full(rows.size, -1, np.int32)
    size = 0
    for row in range(rows.size):
        r = rows[row]
        for i in range(requests.num_blocks[r]):
            block = requests.blocks[requests.first[r] + i]
            if node_of[block] < 0:
                node_of[block] = size
                blocks[size], parent[size] = block, leaf[row]
                length[size] = _tokens(requests, r, i)
                size += 1
            leaf[row] = node_of[block]
    for block in blocks[:size]:
        node_of[block] = -1
    return parent[:size].copy(), length[:size].copy(), leaf
