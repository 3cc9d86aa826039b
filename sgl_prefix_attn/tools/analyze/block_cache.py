"""The KV cache of the simulated server: which blocks running requests hold, and which are left from
those before, evicted when they were used longest ago. Loops for numba; all state is in arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgl_prefix_attn.jit import cached_njit

# Places in BlockCache.counts.
C_USED, C_HELD = range(2)


class BlockCache(NamedTuple):
    """holders int32 [n]: how many running requests hold a block, -1 of one that is not there;
    older, newer int32 [n + 1]: those that nobody holds as a ring, by when they were released, whose
    place n is before the oldest and behind the newest; counts int64 [2]: blocks in the cache, and
    those that anybody holds."""

    holders: np.ndarray
    older: np.ndarray
    newer: np.ndarray
    counts: np.ndarray


def new_cache(blocks: int) -> BlockCache:
    """Make an empty one of blocks 0 to `blocks` - 1."""
    ring = np.full(blocks + 1, blocks, np.int32)
    return BlockCache(np.full(blocks, -1, np.int32), ring, ring.copy(), np.zeros(2, np.int64))


@cached_njit
def hold(cache, block):
    """Let one more running request hold a block. Returns (whether it was there, whether nobody else
    holds it)."""
    holders = cache.holders[block]
    if holders < 0:
        cache.counts[C_USED] += 1
    elif holders == 0:
        _unlink(cache, block)
    cache.holders[block] = max(holders, 0) + 1
    cache.counts[C_HELD] += holders <= 0
    return holders >= 0, holders <= 0


@cached_njit
def release(cache, block):
    """Take one holder from a block. Returns whether it was the last."""
    cache.holders[block] -= 1
    if cache.holders[block] > 0:
        return False
    cache.counts[C_HELD] -= 1
    end = cache.holders.size
    newest = cache.older[end]
    cache.older[block], cache.newer[block] = newest, end
    cache.newer[newest] = cache.older[end] = block
    return True


@cached_njit
def evict(cache):
    """Drop the block that nobody holds for longest. Returns whether there was any."""
    end = cache.holders.size
    oldest = cache.newer[end]
    if oldest == end:
        return False
    _unlink(cache, oldest)
    cache.holders[oldest] = -1
    cache.counts[C_USED] -= 1
    return True


@cached_njit
def _unlink(cache, block):
    older, newer = cache.older[block], cache.newer[block]
    cache.newer[older], cache.older[newer] = newer, older
