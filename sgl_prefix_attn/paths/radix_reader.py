"""Reads SGLang's RadixCache, a tree of node objects.

A node is named by the object, never by its id alone: a split makes a new node for the front and
leaves the old id to the rest.
"""

import numpy as np
import torch

from sgl_prefix_attn.paths.tree_reader import (
    RequestPath,
    RunningBatch,
    TreeInvariantError,
    TreeReader,
    record_of,
)
from sgl_prefix_attn.records import PathTable

_SESSION_NODE = "_VirtualNode"  # a class of sglang.srt.session.streaming_session


def node_of(req):
    """Return where a request's path ends in the tree, None without one: nothing is cached, or its
    KV belongs to a streaming session alone."""
    node = req.last_node
    return None if type(node).__name__ == _SESSION_NODE else node


class RadixReader(TreeReader):
    """TreeReader of sglang.srt.mem_cache.radix_cache.RadixCache, and the base of those of other
    trees whose nodes are linked."""

    def tree_node(self, tree_cache, req):
        """Return the node object where a request's path ends, or None."""
        return node_of(req)

    def slots_of(self, node) -> torch.Tensor | None:
        """Return the KV slots of a node's tokens, None where the device does not have them."""
        return node.value

    def read_paths(self, batch: RunningBatch) -> PathTable:
        index: dict = {}
        parent: list[int] = []
        length: list[int] = []
        node_id: list[int] = []
        leaf = np.full(len(batch.reqs), -1, dtype=np.int32)
        for i_req, req in enumerate(batch.reqs):
            node = self.tree_node(batch.tree_cache, req)
            fresh = []
            # The root is the one node without a parent, also of a tree that was reset since.
            while node is not None and node.parent is not None and node not in index:
                fresh.append(node)
                node = node.parent
            above = index.get(node, -1)
            for node in reversed(fresh):
                slots = self.slots_of(node)
                if slots is None:
                    raise TreeInvariantError(
                        f"request {req.rid}: node {node.id} has no slots on the device"
                    )
                parent.append(above)
                length.append(slots.numel())  # len() of a tensor takes six times as long
                node_id.append(node.id)
                above = index[node] = len(parent) - 1
            leaf[i_req] = above
        return PathTable.of(parent, length, leaf, batch.seq_lens, node_id)

    def request_path(self, tree_cache, req) -> RequestPath:
        nodes, record = [], record_of(req)
        node = self.tree_node(tree_cache, req)
        protected_len = 0 if node is None else record.cache_protected_len
        while node is not None and node.parent is not None:
            nodes.append((node.id, torch.as_tensor(self.slots_of(node))))
            node = node.parent
        return RequestPath(nodes[::-1], protected_len, record.req_pool_idx)
