"""What the rest of the package knows of SGLang's prefix caches: one reader per cache class.

Only the readers touch a request's or a tree's fields; they read attributes and import nothing of
SGLang. What every reader guarantees, and check_paths verifies: the nodes of a request's path hold
its protected tokens, and their slots are the first of its row of req_to_token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import torch

from sgl_prefix_attn.records import PathTable


class TreeInvariantError(RuntimeError):
    """The prefix cache and SGLang's slots disagree; the message names request, node, position."""


class RunningBatch(NamedTuple):
    """A batch as SGLang hands it over.

    reqs          requests in batch order
    tree_cache    SGLang's prefix cache
    seq_lens      int [B] KV tokens of each request, those that attend included; of each further
                  beam of a search one more behind these, which have no request
    req_to_token  int32 [rows, positions] KV slots, on SGLang's device
    is_exact      seq_lens are the device's; else they are as of the last results that the host
                  has processed, some tokens off: enough to decide by, but not to plan with
    """

    reqs: Sequence
    tree_cache: Any
    seq_lens: np.ndarray
    req_to_token: torch.Tensor
    is_exact: bool = True


@dataclass(frozen=True)
class KvMapping:
    """What decides where the KV of a batch lies, of each request. Holds references, so that no
    address is reused meanwhile.

    nodes        where its path ends
    held         protected length, and how often the request was retracted: SGLang may refill the
                 record of a retracted request instead of making another
    allocations  its KV record
    """

    nodes: list
    held: list[tuple[int, int]]
    allocations: list

    @classmethod
    def of(cls, reqs: Sequence) -> KvMapping:
        """Read what must stay for a plan of these requests to stay valid, besides lengths."""
        allocations = [req.kv for req in reqs]
        records = reqs if reqs and record_of(reqs[0]) is reqs[0] else allocations
        held = [
            (record.cache_protected_len, req.retraction_count)
            for record, req in zip(records, reqs, strict=True)
        ]
        return cls([req.last_node for req in reqs], held, allocations)

    def differs_from(self, other: KvMapping) -> bool:
        """Compare allocations by identity: SGLang's compare by value, and a new one may be equal
        (with the radix cache off nothing else changes then)."""
        if self.nodes != other.nodes or self.held != other.held:
            return True
        return any(map(is_not, self.allocations, other.allocations))


@dataclass(frozen=True)
class RequestPath:
    """One request's path as the cache has it, for check_paths.

    nodes          (id, slots int [tokens]) from the root down
    protected_len  KV tokens that the request holds on the path
    row            of req_to_token, None for a request without slots
    """

    nodes: list[tuple[int, torch.Tensor]]
    protected_len: int
    row: int | None


class TreeReader(ABC):
    """Reads the prefix paths of one SGLang cache class. Stateless."""

    @abstractmethod
    def read_paths(self, batch: RunningBatch) -> PathTable:
        """Read the paths of the batch in O(nodes + requests); leaf is -1 without a path."""

    @abstractmethod
    def request_path(self, tree_cache, req) -> RequestPath:
        """Return one request's path, node by node."""


def remaps_of(tree_cache) -> int | None:
    """Count how often running requests may have got other nodes or slots so far (the hook in
    patches/remaps.py counts); None where nothing counts."""
    return getattr(tree_cache, "prefix_attn_remaps", None)


def record_of(req):
    """Return the object that carries a request's cache_protected_len (KV tokens that it holds on
    its path) and req_pool_idx (its row of req_to_token): the request, its KV record from SGLang
    0.5.19 on."""
    return req if hasattr(req, "cache_protected_len") else req.kv


def check_paths(paths: PathTable, batch: RunningBatch, reader: TreeReader) -> None:
    """Verify a PathTable against the cache and the slots (PREFIX_ATTN_CHECK=1).

    For each request: its path holds the protected tokens, fewer than its seq_len, and its row of
    req_to_token has the nodes' slots. Synchronises with the device.
    Raises TreeInvariantError naming request, node and position.
    """
    for i_req, req in enumerate(batch.reqs):
        chain = _chain(paths, int(paths.leaf[i_req]))
        ids = [int(paths.node_id[i_node]) for i_node in chain]
        total = int(sum(paths.length[i_node] for i_node in chain))
        known = reader.request_path(batch.tree_cache, req)
        if total != known.protected_len or total >= paths.seq_lens[i_req]:
            raise TreeInvariantError(
                f"request {req.rid}: the path to node {ids[-1] if ids else None} holds {total} "
                f"tokens, but {known.protected_len} are protected and seq_len is "
                f"{paths.seq_lens[i_req]} (position {min(total, known.protected_len)})"
            )
        if not chain or known.row is None:
            continue
        if ids != [node_id for node_id, _ in known.nodes]:
            raise TreeInvariantError(
                f"request {req.rid}: the path names other nodes than the tree at node {ids[-1]} "
                f"(position 0)"
            )
        lengths = [int(paths.length[i_node]) for i_node in chain]
        _check_slots(f"request {req.rid}", known, lengths, batch.req_to_token[known.row])


def _check_slots(who: str, path: RequestPath, lengths: list[int], row: torch.Tensor) -> None:
    start = 0
    for (node_id, value), length in zip(path.nodes, lengths, strict=True):
        slots, value = row[start : start + length].cpu(), value.cpu()
        if len(value) != length:
            raise TreeInvariantError(
                f"{who}: node {node_id} holds {len(value)} tokens, the path says {length} "
                f"(position {start + min(len(value), length)})"
            )
        differs = torch.nonzero(slots != value.to(slots.dtype)).flatten()
        if len(differs):
            at = int(differs[0])
            raise TreeInvariantError(
                f"{who}: node {node_id} has slot {int(value[at])} at position {start + at}, "
                f"SGLang's row has {int(slots[at])}"
            )
        start += length


def _chain(paths: PathTable, leaf: int) -> list[int]:
    chain = []
    while leaf >= 0:
        chain.append(leaf)
        leaf = int(paths.parent[leaf])
    return chain[::-1]
