"""Reads SGLang's UnifiedRadixCache over its core in Python: ids outside, linked nodes inside."""

import torch

from sgl_prefix_attn.paths.radix_reader import RadixReader, node_of

_FULL_ATTENTION = 0  # ComponentType.FULL


class UnifiedNodeReader(RadixReader):
    """TreeReader of sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."""

    def tree_node(self, tree_cache, req):
        node = node_of(req)
        return None if node is None else tree_cache.tree_core.node_by_id(node)

    def slots_of(self, node) -> torch.Tensor | None:
        return node.component_data[_FULL_ATTENTION].value
