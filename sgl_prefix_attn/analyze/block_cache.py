"""The KV cache of the simulated server: which blocks running requests hold, and which are left from
those before, evicted when they were used longest ago. Loops for numba; all state is in arrays.

A block's slot in an open hash table has its name and how many running requests hold it. When nobody
does any more it stands in a queue with the time of its release; what is at the head and has not
been taken again since is the next to go.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgl_prefix_attn.jit import cached_njit

# Places in BlockCache.counts.
C_USED, C_HELD, C_CLOCK, C_HEAD, C_TAIL = range(5)


class BlockCache(NamedTuple):
    """names uint64 [slots], 0 where a slot is free; holders, released int64 [slots]; queue uint64,
    queued int64 [...] a ring of names and when they were released; counts int64 [5]: blocks in the
    table, those that anybody holds, a clock, and the ring's ends, ever growing."""

    names: np.ndarray
    holders: np.ndarray
    released: np.ndarray
    queue: np.ndarray
    queued: np.ndarray
    counts: np.ndarray


def new_cache(most_blocks: int) -> BlockCache:
    """Make an empty one for up to so many blocks."""
    slots = 1 << (4 * most_blocks + 1024).bit_length()
    return BlockCache(
        np.zeros(slots, np.uint64),
        np.zeros(slots, np.int64),
        np.zeros(slots, np.int64),
        np.zeros(slots, np.uint64),
        np.zeros(slots, np.int64),
        np.zeros(5, np.int64),
    )


@cached_njit
def find(cache, name):
    """The slot of a name, or the free one where it would be."""
    mask = cache.names.size - 1
    slot = np.int64(name & np.uint64(mask))
    while cache.names[slot] != 0 and cache.names[slot] != name:
        slot = (slot + 1) & mask
    return slot


@cached_njit
def hold(cache, name):
    """Let one more running request hold a block. Returns (whether it was there, whether nobody else
    holds it)."""
    slot = find(cache, name)
    was_there = cache.names[slot] != 0
    if not was_there:
        cache.names[slot] = name
        cache.holders[slot] = 0
        cache.counts[C_USED] += 1
    cache.holders[slot] += 1
    is_first = cache.holders[slot] == 1
    if is_first:
        cache.counts[C_HELD] += 1
    return was_there, is_first


@cached_njit
def release(cache, name):
    """Take one holder from a block. Returns whether it was the last."""
    slot = find(cache, name)
    cache.holders[slot] -= 1
    if cache.holders[slot] > 0:
        return False
    counts = cache.counts
    counts[C_HELD] -= 1
    counts[C_CLOCK] += 1
    cache.released[slot] = counts[C_CLOCK]
    if counts[C_TAIL] - counts[C_HEAD] == cache.queue.size:
        evict(cache)
    place = counts[C_TAIL] & (cache.queue.size - 1)
    cache.queue[place] = name
    cache.queued[place] = counts[C_CLOCK]
    counts[C_TAIL] += 1
    return True


@cached_njit
def evict(cache):
    """Drop the head of the queue, and its block unless it was taken again. Returns whether there
    was any."""
    counts = cache.counts
    if counts[C_HEAD] == counts[C_TAIL]:
        return False
    place = counts[C_HEAD] & (cache.queue.size - 1)
    counts[C_HEAD] += 1
    slot = find(cache, cache.queue[place])
    here = cache.names[slot] != 0
    if here and cache.holders[slot] == 0 and cache.released[slot] == cache.queued[place]:
        _free(cache, slot)
    return True


@cached_njit
def _free(cache, slot):
    """Empty a slot and move back what stands behind it, so that no search ends too early."""
    names, mask = cache.names, cache.names.size - 1
    cache.counts[C_USED] -= 1
    hole, slot = slot, (slot + 1) & mask
    while names[slot] != 0:
        home = np.int64(names[slot] & np.uint64(mask))
        if ((slot - home) & mask) >= ((slot - hole) & mask):
            names[hole] = names[slot]
            cache.holders[hole] = cache.holders[slot]
            cache.released[hole] = cache.released[slot]
            hole = slot
        slot = (slot + 1) & mask
    names[hole] = 0
