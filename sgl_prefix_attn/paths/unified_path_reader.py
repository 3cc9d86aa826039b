"""Reads SGLang's UnifiedRadixCache by the paths that its core in Rust tells.

A node is named by its id, which SGLang never gives to another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl_prefix_attn.paths.request_fields import fields_of, mapping_of, node_of
from sgl_prefix_attn.paths.tree_reader import (
    KvMapping,
    RequestPath,
    RunningBatch,
    TreeInvariantError,
)
from sgl_prefix_attn.records import PathTable


class UnifiedPathReader:
    """TreeReader of sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache over any core that
    tells paths (from 0.5.22 on)."""

    def read_paths(self, batch: RunningBatch) -> PathTable:
        index: dict[int, int] = {}
        parent: list[int] = []
        length: list[int] = []
        node_id: list[int] = []
        ends = [node_of(req) for req in batch.reqs]
        # Each path once: requests of one prompt end at the same node.
        distinct = [end for end in dict.fromkeys(ends) if end is not None]
        leaf_of: dict[int | None, int] = {None: -1}
        paths = batch.tree_cache.tree_core.collect_path_info(distinct)
        for end, path in zip(distinct, paths, strict=True):
            above, known = -1, 0
            for depth in range(len(path), 0, -1):
                at = index.get(path[depth - 1].node_id)
                if at is not None:
                    above, known = at, depth
                    break
            for node in path[known:]:
                tokens = node.path_end - node.path_start
                if node.full_value_len != tokens:
                    raise TreeInvariantError(
                        f"node {node.node_id} has {node.full_value_len} slots on the device for "
                        f"{tokens} tokens (position {node.path_start})"
                    )
                parent.append(above)
                length.append(tokens)
                node_id.append(node.node_id)
                above = index[node.node_id] = len(parent) - 1
            leaf_of[end] = above
        return PathTable(
            parent=np.array(parent, dtype=np.int32),
            length=np.array(length, dtype=np.int32),
            node_id=np.array(node_id, dtype=np.int64),
            leaf=np.array([leaf_of[end] for end in ends], dtype=np.int32),
            seq_lens=np.asarray(batch.seq_lens, dtype=np.int32),
        )

    def mapping(self, reqs: Sequence) -> KvMapping:
        return mapping_of(reqs)

    def remaps(self, tree_cache) -> int | None:
        return getattr(tree_cache, "prefix_attn_remaps", None)

    def request_path(self, tree_cache, req) -> RequestPath:
        fields = fields_of(req)
        ends = [end for end in (node_of(req),) if end is not None]
        nodes = [
            (node.node_id, tree_cache.path_device_indices(end)[node.path_start : node.path_end])
            for end in ends
            for path in tree_cache.tree_core.collect_path_info(ends)
            for node in path
        ]
        return RequestPath(nodes, fields.protected_len(req) if ends else 0, fields.row(req))
