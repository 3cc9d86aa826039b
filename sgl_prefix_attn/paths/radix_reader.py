"""The only reader of SGLang's radix structures: a batch's prefix paths as a PathTable.

Reads attributes only and imports nothing of SGLang. What SGLang 0.5.17 guarantees, and
check_paths verifies: the nodes from a request's `last_node` up to the root hold
`cache_protected_len` tokens together, and their `value` tensors are the request's first slots.
A node is named by the object, never by its id alone: a split makes a new node for the front and
leaves the old id to the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sgl_prefix_attn.records import PathTable

_CHUNK_CACHE = ("sglang.srt.mem_cache.chunk_cache", "ChunkCache")
_RADIX_CACHE = ("sglang.srt.mem_cache.radix_cache", "RadixCache")


class TreeInvariantError(RuntimeError):
    """The radix tree and SGLang's slots disagree; the message names request, node and position."""


def unsupported_tree(tree_cache) -> str | None:
    """Why the paths of this cache cannot be read, or None.

    The class must match exactly: HiRadixCache and LMCRadixCache derive from RadixCache and keep
    values elsewhere, so a subclass is not supported until it has been tried.
    """
    kind = type(tree_cache)
    if (kind.__module__, kind.__name__) in (_RADIX_CACHE, _CHUNK_CACHE):
        return None
    return f"tree:{kind.__name__}"


def remaps(tree_cache) -> int | None:
    """How often running requests may have got other nodes or slots so far (patches/remaps.py).
    None: not counted, as in a cache that keeps no tree."""
    return getattr(tree_cache, "prefix_attn_remaps", None)


def read_paths(reqs: Sequence, tree_cache, seq_lens: np.ndarray) -> PathTable:
    """Prefix paths of the batch in O(nodes + requests).

    reqs       requests in batch order (`last_node`, or None)
    tree_cache SGLang's prefix cache; one for which unsupported_tree returns a reason raises
               ValueError
    seq_lens   int [B] KV tokens of each request, the token being decoded included

    Without a path (no node, the root, a cache that keeps no tree) leaf is -1.
    """
    reason = unsupported_tree(tree_cache)
    if reason is not None:
        raise ValueError(f"tree_cache cannot be read ({reason})")
    index: dict = {}
    parent: list[int] = []
    length: list[int] = []
    node_id: list[int] = []
    leaf = np.full(len(reqs), -1, dtype=np.int32)
    for i_req, req in enumerate(reqs):
        node = req.last_node
        fresh = []
        # The root is the one node without a parent, also of a tree that has been reset since.
        while node is not None and node.parent is not None and node not in index:
            fresh.append(node)
            node = node.parent
        above = index.get(node, -1)
        for node in reversed(fresh):
            parent.append(above)
            length.append(node.value.numel())  # len() of a tensor takes six times as long
            node_id.append(node.id)
            above = index[node] = len(parent) - 1
        leaf[i_req] = above
    return PathTable(
        parent=np.array(parent, dtype=np.int32),
        length=np.array(length, dtype=np.int32),
        node_id=np.array(node_id, dtype=np.int64),
        leaf=leaf,
        seq_lens=np.asarray(seq_lens, dtype=np.int32),
    )


def check_paths(paths: PathTable, reqs: Sequence, tree_cache, req_to_token: torch.Tensor) -> None:
    """Verify a PathTable against the requests and their slots (SGL_PREFIX_ATTN_CHECK=1).

    For each request: its path holds cache_protected_len tokens, fewer than its seq_len, and
    req_to_token [rows, positions] has the nodes' values in its row. Synchronises with the device.
    Raises TreeInvariantError naming request, node and position.
    """
    for i_req, req in enumerate(reqs):
        chain = _chain(paths, int(paths.leaf[i_req]))
        total = int(sum(paths.length[i_node] for i_node in chain))
        last_id = int(paths.node_id[chain[-1]]) if chain else None
        if total != req.cache_protected_len or total >= paths.seq_lens[i_req]:
            raise TreeInvariantError(
                f"request {req.rid}: the path to node {last_id} holds {total} tokens, but "
                f"cache_protected_len is {req.cache_protected_len} and seq_len is "
                f"{paths.seq_lens[i_req]} (position {min(total, req.cache_protected_len)})"
            )
        if not chain or req.req_pool_idx is None:
            continue
        nodes = _tree_nodes(req)
        if [node.id for node in nodes] != [int(paths.node_id[i_node]) for i_node in chain]:
            raise TreeInvariantError(
                f"request {req.rid}: the path names other nodes than the tree at node {last_id} "
                f"(position 0)"
            )
        _check_slots(req, nodes, [int(paths.length[i]) for i in chain], req_to_token)


def _check_slots(req, nodes: list, lengths: list[int], req_to_token: torch.Tensor) -> None:
    start = 0
    for node, length in zip(nodes, lengths, strict=True):
        slots = req_to_token[req.req_pool_idx, start : start + length].cpu()
        value = torch.as_tensor(node.value).cpu()
        if len(value) != length:
            raise TreeInvariantError(
                f"request {req.rid}: node {node.id} holds {len(value)} tokens, the path says "
                f"{length} (position {start + min(len(value), length)})"
            )
        differs = torch.nonzero(slots != value.to(slots.dtype)).flatten()
        if len(differs):
            at = int(differs[0])
            raise TreeInvariantError(
                f"request {req.rid}: node {node.id} has slot {int(value[at])} at position "
                f"{start + at}, SGLang's row has {int(slots[at])}"
            )
        start += length


def _chain(paths: PathTable, leaf: int) -> list[int]:
    chain = []
    while leaf >= 0:
        chain.append(leaf)
        leaf = int(paths.parent[leaf])
    return chain[::-1]


def _tree_nodes(req) -> list:
    nodes = []
    node = req.last_node
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]
