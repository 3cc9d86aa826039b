"""Reads SGLang's UnifiedRadixCache by the paths that its core in Rust tells.

A node is named by its id, which SGLang never gives to another one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import astuple

from sgl_prefix_attn.paths.tree_reader import (
    RequestPath,
    RunningBatch,
    TreeInvariantError,
    TreeReader,
    record_of,
)
from sgl_prefix_attn.records import PathTable

_FIELDS = 5  # of a node that are read; later releases have more


def _paths(core, ends: list[int]) -> Sequence[Sequence[tuple]]:
    """Return the nodes from the root to each end: id, parent's id, first and last position, slots
    on the device.

    SGLang wraps each node into a struct, which takes longer than all the rest; what it wraps are
    tuples of the struct's fields in their order.
    """
    binding = getattr(core, "_binding", None)
    if binding is not None:
        return binding.collect_path_info(ends)
    return [[astuple(node) for node in path] for path in core.collect_path_info(ends)]


class UnifiedPathReader(TreeReader):
    """TreeReader of sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache over any core that
    tells paths (from 0.5.22 on). Column by column: a loop over the nodes takes twice as long."""

    def read_paths(self, batch: RunningBatch) -> PathTable:
        ends = [req.last_node for req in batch.reqs]
        # Each path once, as requests of one prompt end at the same node. What is no id is no path:
        # None, or the node of a streaming session.
        distinct = [end for end in dict.fromkeys(ends) if type(end) is int]
        paths = _paths(batch.tree_cache.tree_core, distinct)
        # Parents come before children: a dict keeps the order in which its keys came first.
        nodes = {node[0]: node for path in paths for node in path}
        columns = list(zip(*nodes.values(), strict=True))[:_FIELDS] or [()] * _FIELDS
        ids, parents, starts, stops, slots = columns
        index = dict(zip(ids, range(len(ids)), strict=True))
        length = np.array(stops, dtype=np.int32) - np.array(starts, dtype=np.int32)
        if list(slots) != length.tolist():
            for node, _, start, stop, on_device, *_ in nodes.values():
                if on_device != stop - start:
                    raise TreeInvariantError(
                        f"node {node} has {on_device} slots on the device for {stop - start} "
                        f"tokens (position {start})"
                    )
        parent = [index.get(node, -1) for node in parents]
        leaf = [index.get(end, -1) for end in ends]
        return PathTable.of(parent, length, leaf, batch.seq_lens, ids)

    def request_path(self, tree_cache, req) -> RequestPath:
        record, end = record_of(req), req.last_node
        if type(end) is not int:
            return RequestPath([], 0, record.req_pool_idx)
        (path,) = _paths(tree_cache.tree_core, [end])
        slots: Any = tree_cache.path_device_indices(end) if path else None
        nodes = [(node, slots[start:stop]) for node, _, start, stop, *_ in path]
        return RequestPath(nodes, record.cache_protected_len, record.req_pool_idx)
