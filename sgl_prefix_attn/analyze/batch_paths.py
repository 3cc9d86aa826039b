"""The batch that decodes, as the prefix paths that the server would read from its radix tree."""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.analyze.block_cache import find, new_cache
from sgl_prefix_attn.analyze.server_state import Requests
from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.records import PathTable


def batch_paths(requests: Requests, rows: np.ndarray, seq_lens: np.ndarray) -> PathTable:
    """Return the paths of the requests `rows` int64 [B], whose lengths are seq_lens int64 [B]: a
    node for each block of their prompts."""
    table = new_cache(int(requests.num_blocks[rows].sum()))
    parent, length, leaf = _nodes(requests, table, rows)
    lens = seq_lens.astype(np.int32)
    return PathTable(parent, length, np.arange(parent.size, dtype=np.int64), leaf, lens)


@cached_njit
def _nodes(requests, table, rows):
    most = 0
    for r in rows:
        most += requests.num_blocks[r]
    parent, length = np.empty(most, np.int32), np.empty(most, np.int32)
    leaf = np.full(rows.size, -1, np.int32)
    size = 0
    for row in range(rows.size):
        r = rows[row]
        above = np.int32(-1)
        for i in range(requests.num_blocks[r]):
            name = requests.blocks[requests.first[r] + i]
            slot = find(table, name)
            if table.names[slot] == 0:
                table.names[slot] = name
                table.holders[slot] = size
                parent[size] = above
                left = requests.prompt[r] - i * requests.block_tokens
                length[size] = min(requests.block_tokens, left)
                size += 1
            above = np.int32(table.holders[slot])
        leaf[row] = above
    return parent[:size].copy(), length[:size].copy(), leaf
