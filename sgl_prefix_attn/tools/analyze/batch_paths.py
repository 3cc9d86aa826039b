"""The batch that decodes, as the prefix paths that the server would read from its radix tree."""

from __future__ import annotations

import numpy as np

from sgl_prefix_attn.jit import cached_njit
from sgl_prefix_attn.records import PathTable
from sgl_prefix_attn.tools.analyze.trace import Trace


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
                left = requests.prompt[r] - i * requests.block_tokens
                length[size] = min(requests.block_tokens, left)
                size += 1
            leaf[row] = node_of[block]
    for block in blocks[:size]:
        node_of[block] = -1
    return parent[:size].copy(), length[:size].copy(), leaf
