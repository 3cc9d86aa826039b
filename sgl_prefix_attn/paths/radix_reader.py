"""Reads SGLang's RadixCache, a tree of node objects.

A node is named by the object, never by its id alone: a split makes a new node for the front and
leaves the old id to the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sgl_prefix_attn.paths.tree_reader import KvMapping, RequestPath, RunningBatch
from sgl_prefix_attn.records import PathTable


class RadixReader:
    """TreeReader of sglang.srt.mem_cache.radix_cache.RadixCache."""

    def read_paths(self, batch: RunningBatch) -> PathTable:
        index: dict = {}
        parent: list[int] = []
        length: list[int] = []
        node_id: list[int] = []
        leaf = np.full(len(batch.reqs), -1, dtype=np.int32)
        for i_req, req in enumerate(batch.reqs):
            node = req.last_node
            fresh = []
            # The root is the one node without a parent, also of a tree that was reset since.
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
            seq_lens=np.asarray(batch.seq_lens, dtype=np.int32),
        )

    def mapping(self, reqs: Sequence) -> KvMapping:
        return KvMapping(
            [req.last_node for req in reqs],
            [req.cache_protected_len for req in reqs],
            [req.kv for req in reqs],
        )

    def remaps(self, tree_cache) -> int | None:
        return getattr(tree_cache, "prefix_attn_remaps", None)

    def request_path(self, req) -> RequestPath:
        nodes = []
        node = req.last_node
        while node is not None and node.parent is not None:
            nodes.append((node.id, torch.as_tensor(node.value)))
            node = node.parent
        return RequestPath(nodes[::-1], req.cache_protected_len, req.req_pool_idx)
