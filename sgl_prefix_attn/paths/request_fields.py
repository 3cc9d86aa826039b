"""Where a request keeps what the readers need: itself, from SGLang 0.5.19 on in its KV record."""

from collections.abc import Sequence

from sgl_prefix_attn.paths.tree_reader import KvMapping

_SESSION_NODE = "_VirtualNode"  # a class of sglang.srt.session.streaming_session


def node_of(req):
    """Return where a request's path ends in the tree, None without one: nothing is cached, or its
    KV belongs to a streaming session alone."""
    node = req.last_node
    return None if type(node).__name__ == _SESSION_NODE else node


def record_of(req):
    """Return what has the request's cache_protected_len, KV tokens that it holds on its path, and
    req_pool_idx, its row of req_to_token."""
    return req if hasattr(req, "cache_protected_len") else req.kv


class RequestReader:
    """What a TreeReader reads alike of every cache: its requests and the count of remaps."""

    def mapping(self, reqs: Sequence) -> KvMapping:
        allocations = [req.kv for req in reqs]
        records = reqs if reqs and record_of(reqs[0]) is reqs[0] else allocations
        held = [
            (record.cache_protected_len, req.retraction_count)
            for record, req in zip(records, reqs, strict=True)
        ]
        return KvMapping([req.last_node for req in reqs], held, allocations)

    def remaps(self, tree_cache) -> int | None:
        return getattr(tree_cache, "prefix_attn_remaps", None)
