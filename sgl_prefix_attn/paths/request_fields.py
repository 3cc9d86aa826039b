"""Where a request keeps what the readers need: itself, from SGLang 0.5.19 on in its KV record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from sgl_prefix_attn.paths.tree_reader import KvMapping


class RequestFields(NamedTuple):
    """protected_len: KV tokens that the request holds on its path. row: of req_to_token."""

    protected_len: Callable
    row: Callable


_ON_REQUEST = RequestFields(attrgetter("cache_protected_len"), attrgetter("req_pool_idx"))
_IN_RECORD = RequestFields(attrgetter("kv.cache_protected_len"), attrgetter("kv.req_pool_idx"))


_SESSION_NODE = "_VirtualNode"  # a class of sglang.srt.session.streaming_session


def node_of(req):
    """Return where a request's path ends in the tree, None without one: nothing is cached, or its
    KV belongs to a streaming session alone."""
    node = req.last_node
    return None if type(node).__name__ == _SESSION_NODE else node


def fields_of(req) -> RequestFields:
    return _ON_REQUEST if hasattr(req, "cache_protected_len") else _IN_RECORD


class RequestReader:
    """What a TreeReader reads alike of every cache: its requests and the count of remaps."""

    def mapping(self, reqs: Sequence) -> KvMapping:
        if not reqs:
            return KvMapping([], [], [])
        protected_len = fields_of(reqs[0]).protected_len
        return KvMapping(
            [req.last_node for req in reqs],
            [(protected_len(req), req.retraction_count) for req in reqs],
            [req.kv for req in reqs],
        )

    def remaps(self, tree_cache) -> int | None:
        return getattr(tree_cache, "prefix_attn_remaps", None)
