"""The records that pass between stages, in the order of the data flow.

    PathTable -> Forest -> Packing -> Packs -> Plan

Every stage is a pure function from one record to the next; nothing here imports another stage.
Arrays are numpy on the host. B is the number of requests, N the number of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

# The two kinds of kernels that a decode step runs: ours over a plan, or "stock" ones: those of the
# SGLang backend that ours composes (FlashInfer on a GPU, torch_native on a CPU).
PREFIX, STOCK = "prefix", "stock"


class PlanTooLarge(RuntimeError):
    """The plan needs more workspace than the executor was made with."""


@dataclass(frozen=True)
class HeadConfig:
    """Attention heads of one layer on one tensor-parallel rank.

    Raises ValueError when the query heads are no multiple of the KV heads.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self):
        for name in ("num_qo_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads ({self.num_qo_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (GQA)."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class PathTable:
    """The prefix paths of a batch as a table of nodes.

    parent   int32 [N]  index of the parent node, -1 at a root; parents come before children
    length   int32 [N]  KV tokens that the node holds
    node_id  int64 [N]  the tree's own name for the node (for messages only)
    leaf     int32 [B]  deepest node of each request, -1 without a path
    seq_lens int32 [B]  KV tokens of each request, the token being decoded included

    The lengths along a request's path sum to less than its seq_len: the token being decoded is
    always private.
    """

    parent: np.ndarray
    length: np.ndarray
    node_id: np.ndarray
    leaf: np.ndarray
    seq_lens: np.ndarray

    @classmethod
    def of(cls, parent, length, leaf, seq_lens, node_id=None) -> PathTable:
        """Make one from sequences of integers; without node_id a node's name is its index."""
        return cls(
            parent=np.array(parent, np.int32),
            length=np.array(length, np.int32),
            node_id=np.array(range(len(parent)) if node_id is None else node_id, np.int64),
            leaf=np.array(leaf, np.int32),
            seq_lens=np.array(seq_lens, np.int32),
        )

    @classmethod
    def smallest_shared(cls) -> PathTable:
        """Return two requests below one node: enough to compile a planner's loops."""
        return cls.of(parent=[-1], length=[16], leaf=[0, 0], seq_lens=[17, 18])


@dataclass(frozen=True)
class Forest:
    """Nodes that at least two requests share; all else is the requests' private tails.

    parent      int32 [N]    parents come before children, -1 at a root
    start, end  int32 [N]    KV positions [start, end) that the node covers on its requests' rows
    num_queries int32 [N]    requests below the node
    tail_parent int32 [B]    node that the request's tail hangs below, -1 if it shares nothing
    tail_start  int32 [B]    first KV position of the tail, which ends at seq_len
    seq_lens    int32 [B]
    query_lens  int32 [B]    the request's newest tokens that attend, each to itself and to all
                             before it; None: one token each
    """

    parent: np.ndarray
    start: np.ndarray
    end: np.ndarray
    num_queries: np.ndarray
    tail_parent: np.ndarray
    tail_start: np.ndarray
    seq_lens: np.ndarray
    query_lens: np.ndarray | None = None

    @cached_property
    def unique_tokens(self) -> int:
        """KV tokens of the batch, each shared one counted once."""
        return int((self.end - self.start).sum() + (self.seq_lens - self.tail_start).sum())


@dataclass(frozen=True)
class Packing:
    """What the profit model decided: who absorbs the KV of the node above (PAT §5.1, scheme 2).

    node bool [N]  the node's pack also reads its parent's KV, so the parent's pack does without
                   the node's queries
    tail bool [B]  the same for the request's tail
    """

    node: np.ndarray
    tail: np.ndarray


@dataclass(frozen=True)
class Packs:
    """Queries that read one stretch of KV together: one CTA's work before tiling.

    kv_start, kv_end int32 [P]    KV positions; every query of the pack has the same slots there
    tail             int32 [P]    the request whose tail ends the pack (it grows), else -1
    query_offset     int32 [P+1]  CSR offsets into queries
    queries          int32 [...]  request of each query
    """

    kv_start: np.ndarray
    kv_end: np.ndarray
    tail: np.ndarray
    query_offset: np.ndarray
    queries: np.ndarray


@dataclass(frozen=True)
class PlanStats:
    """What one layer of a planned step reads, in KV tokens of all KV heads, and its parts."""

    num_nodes: int
    num_packs: int
    num_items: int
    num_partials: int
    kv_tokens_read: int
    kv_tokens_query_centric: int
    kv_tokens_unique: int


@dataclass(frozen=True)
class PlanWork:
    """What one layer of a plan does, for predicting its time; tokens count for all KV heads.

    tail_tokens    KV tokens that tails tiles read
    shared_tokens  KV tokens that shared tiles read ...
    reread_tokens  ... and read again, for row tiles beyond a pack's first
    shared_rows    shared tokens times the rows of the tiles over them
    tail_items, shared_items  work items, each run once per KV head
    tail_chain, shared_chain  time of the busiest CTA, in KV tokens of a tails CTA: whole blocks of
                   a tile, its work items' fixed cost, and for tails the wait for shared CTAs
    partials       partial rows ...
    most_parts     ... and how many of them the request with most of them has, 0 without any
    """

    tail_tokens: int
    shared_tokens: int
    reread_tokens: int
    shared_rows: int
    tail_items: int
    shared_items: int
    tail_chain: float
    shared_chain: float
    partials: int
    most_parts: int


class StepPlan(Protocol):
    """What the plans of all families of kernels tell: more is between a planner and its kernels.

    words           int32 [...]  in the layout that the family's kernels read
    num_index_slots entries that kv_indices needs (headroom included)
    num_partials    rows of partial_out and lse that the step needs
    longest         KV tokens of the longest segment
    appends_left    tokens that every request may grow before its headroom is full
    """

    @property
    def words(self) -> np.ndarray: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def num_index_slots(self) -> int: ...
    @property
    def num_partials(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def appends_left(self) -> int: ...
    @property
    def stats(self) -> PlanStats: ...


@dataclass(frozen=True)
class Plan:
    """One decode step as packs, a StepPlan; valid for any KV pool with the same slots.

    words     int32 [...]  layout in kernels/layout.py
    seq_lens  int32 [B] lengths at planning time
    """

    words: np.ndarray
    batch_size: int
    num_index_slots: int
    num_partials: int
    appends_left: int
    seq_lens: np.ndarray
    stats: PlanStats
    work: PlanWork
    forest: Forest
    packs: Packs

    @property
    def longest(self) -> int:
        return int((self.packs.kv_end - self.packs.kv_start).max(initial=1))


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds per layer of both kernels."""

    stock_us: float
    prefix_us: float


@dataclass(frozen=True)
class Decision:
    """Which kernels run this decode step (PREFIX or STOCK) and why.

    predicted  what the choice rests on, None where it rests on nothing measured
    strategy   what a prefix step's plan is made with; None for a stock step
    """

    variant: str
    reason: str
    predicted: Prediction | None = field(default=None, compare=False)
    strategy: str | None = field(default=None, compare=False)
